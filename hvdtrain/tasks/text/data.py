"""The texts of a run on every rank: tokenized by one rank of each host, identical on all hosts.

A dry run uses blank texts: nothing is downloaded, and no vocabulary is learned.
"""

import numpy as np

from hvdtrain.loop.feed.sequences import Sequences
from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_message
from hvdtrain.tasks.text import tokens
from hvdtrain.tasks.text.corpus import make_corpus
from hvdtrain.tasks.text.pretrained import Pretrained
from hvdtrain.tasks.text.settings import BertSettings
from hvdtrain.tasks.text.tokenizer_files import read_vocabulary
from hvdtrain.tasks.text.tokens import Shape, Texts, label_spellings
from hvdtrain.tasks.text.vocabulary import SPECIALS, Vocabulary


def load_on_all(comm: Comm, config: BertSettings, pretrained: Pretrained | None) -> Texts:
    """Load the texts as tokens of the pretrained model's vocabulary, if there is one; BadInput if that fails."""
    if config.dry_run:
        return agree(comm, lambda: outline(config, pretrained))

    def prepare() -> tuple[str, str]:
        shape = Shape(
            vocabulary=choose_vocabulary(config, pretrained),
            vocab_size=config.vocab_size,
            max_tokens=config.max_tokens,
            in_blocks=config.data == "text",
            labelled=config.task == "classify",
        )
        try:
            corpus = make_corpus(config)
            return tokens.prepare(corpus, shape), corpus.usage
        except OSError as error:
            raise BadInput(
                f"{error.filename}: cannot be used ({error.strerror}). Check the path and its permissions."
            ) from error

    local_key, usage = agree(comm, lambda: prepare() if comm.local_rank == 0 else (None, ""))
    key = next(key for key in comm.allgather(local_key) if key is not None)
    require_equal(comm, {"the texts and their vocabulary (SHA-256)": local_key or key})
    texts = agree(comm, lambda: tokens.open_texts(key))
    require_equal(comm, {"the texts as numbers (SHA-256)": texts.sha256})
    if comm.rank == 0 and usage:
        print_message("note", usage)
    return texts


def choose_vocabulary(config: BertSettings, pretrained: Pretrained | None) -> Vocabulary | None:
    """Return the vocabulary of the settings; None if it must be learned."""
    folder = config.tokenizer
    vocabulary = None if folder is None else read_vocabulary(folder, f"--tokenizer {folder}")
    if pretrained is None:
        return vocabulary
    if vocabulary is not None:
        pretrained.require_vocabulary(vocabulary, str(config.tokenizer))
    return pretrained.vocabulary


class BlankSequences(Sequences):
    """Sequences of zeros."""

    assumed = ""  # describes the assumed data to the user


def outline(settings: BertSettings, pretrained: Pretrained | None) -> Texts:
    """Return as many texts of --max-tokens tokens as a step takes, with the largest vocabulary of the settings."""
    words = settings.vocab_size if pretrained is None else pretrained.sizes.vocabulary
    labels = label_names(settings)
    of_rank = 0 if settings.batch_size_per_rank == "auto" else settings.batch_size_per_rank
    step = max(settings.global_batch_size or 0, of_rank * settings.accumulate_steps)
    assumed = f"texts of {settings.max_tokens} tokens, a vocabulary of {words:,}"
    if labels:
        assumed += f", {len(labels)} labels"
    zeros = np.zeros(max(2 * step, settings.max_tokens), dtype=np.int64)
    lengths = zeros[: 2 * step] + settings.max_tokens
    lengths[1::2] -= settings.data != "text"  # so that batches have padding, like texts of unequal lengths
    split = BlankSequences(zeros.astype(np.uint16), starts=zeros[: 2 * step], lengths=lengths, labels=zeros[: 2 * step])
    split.assumed = assumed
    return Texts(
        train=split,
        test=split,
        vocabulary=Vocabulary(tokens=(*SPECIALS, *(f"##{number}" for number in range(words - len(SPECIALS))))),
        labels=labels,
        cut_count=0,
        unknown_share=0.0,
        sha256="",
    )


def label_names(settings: BertSettings) -> tuple[str, ...]:
    """Return the labels of the texts if they exist here, else two; empty if the texts have no labels."""
    if settings.task == "mlm":
        return ()
    if settings.data != "icd10" and not settings.data_dir.is_dir():
        return ("0", "1")
    labels = {row.label for row in make_corpus(settings).train() if row.label is not None}
    return tuple(sorted({*label_spellings(labels).values()}))
