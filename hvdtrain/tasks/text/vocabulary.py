"""WordPiece vocabularies and their tokenizers; a vocabulary is learned from texts deterministically."""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

from hvdtrain.settings.safety.exits import BadInput

PAD, UNKNOWN, START, END, MASK = SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The most frequent letters that are tokens; if there is room, more of them up to this share of the texts, as in
# SentencePiece (Kudo and Richardson 2018) for Chinese and Japanese. The others are [UNK].
_MIN_LETTERS, _COVERED_SHARE = 1000, 0.9995


@dataclass(frozen=True, kw_only=True)
class Added:
    """A token that is found in a text before its words are split; the fields are those of tokenizers.AddedToken."""

    content: str
    single_word: bool = False  # not inside a word
    lstrip: bool = False  # with the white space before it
    rstrip: bool = False  # and after it
    normalized: bool = True  # in any case of its letters if those of the text are lower-cased
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by number."""

    tokens: tuple[str, ...]
    pieces: int | None = None  # tokens that words are split into, the first ones; None: all
    added: tuple[Added, ...] = ()  # include the tokens after the pieces
    lower_case: bool = True
    strip_accents: bool | None = None  # None: if letters are lower-cased

    @property
    def sha256(self) -> str:
        """The SHA-256 of everything that affects tokenization."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def id(self, token: str) -> int:
        """Return the number of a token; of equal ones the last counts, as for the tokenizer."""
        return len(self.tokens) - 1 - self.tokens[::-1].index(token)

    def encoder(self) -> Callable[[Sequence[str]], list[list[int]]]:
        """Return a function from texts to the token numbers of each, without [CLS] and [SEP]."""
        numbers = {token: number for number, token in enumerate(self.tokens[: self.pieces])}
        tokenizer = _tokenizer(numbers, lower_case=self.lower_case, strip_accents=self.strip_accents)
        seen: set[str] = set()
        for added in self.added:
            text = tokenizer.normalizer.normalize_str(added.content)
            # The library would find one at random of two with the same normalized text: the second is taken literally.
            normalized = added.normalized and text not in seen
            seen.update([text] if normalized else [])
            tokenizer.add_tokens([AddedToken(**{**asdict(added), "normalized": normalized})])
        return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def learn_vocabulary(texts: Callable[[], Iterable[str]], size: int) -> Vocabulary:
    """Learn at most `size` lower-case tokens from these texts; BadInput if `size` is too small.

    The library's trainer orders equally frequent tokens by the state of its hash tables, unless it is given all letters
    beforehand, including those that continue a word (huggingface/tokenizers #1794).
    """
    # Outside of Latin scripts an accent is part of the letter: without it Japanese ga is ka.
    tokenizer = _tokenizer({UNKNOWN: 0}, strip_accents=False)
    alphabet = _alphabet(tokenizer, texts(), max_letters=(size - len(SPECIALS)) // 2)
    initial_tokens = [*SPECIALS, *(f"##{letter}" for letter in alphabet)]
    needed = len(initial_tokens) + len(alphabet)
    if size < needed:
        raise BadInput(
            f"--vocab-size {size}: the {len(alphabet)} letters of the texts need {needed} tokens. Pass more."
        )
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        special_tokens=initial_tokens,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    numbers = tokenizer.get_vocab()
    return Vocabulary(tokens=tuple(sorted(numbers, key=lambda token: numbers[token])), strip_accents=False)


def _tokenizer(numbers: dict[str, int], *, lower_case: bool = True, strip_accents: bool | None = None) -> Tokenizer:
    """Return BERT's tokenizer: it splits at white space and punctuation, and words into the longest prefixes."""
    tokenizer = Tokenizer(WordPiece(numbers, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(tokenizer: Tokenizer, texts: Iterable[str], *, max_letters: int) -> list[str]:
    """Return the letters that become tokens; up to `max_letters` if 1,000 are too few."""
    letter_counts: Counter[str] = Counter()
    for text in texts:
        letter_counts.update(tokenizer.normalizer.normalize_str(text))
    letters = sorted(
        (letter for letter in letter_counts if not letter.isspace()),
        key=lambda letter: (-letter_counts[letter], letter),
    )
    cumulative = list(accumulate(letter_counts[letter] for letter in letters))
    covering_count = bisect_left(cumulative, _COVERED_SHARE * cumulative[-1]) + 1 if cumulative else 0
    return sorted(letters[: max(_MIN_LETTERS, min(covering_count, max_letters))])
