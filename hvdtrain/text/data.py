"""The texts of a run on every rank: made into numbers by one rank of each host, the same ones on all hosts."""

from hvdtrain.ranks.agree import agreed, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.text import tokens
from hvdtrain.text.config import BertConfig
from hvdtrain.text.corpus import corpus_of
from hvdtrain.text.pretrained import Pretrained
from hvdtrain.text.tokens import Shape, Texts
from hvdtrain.text.vocabulary import Vocabulary, read


def load_on_all(comm: Comm, config: BertConfig, pretrained: Pretrained | None) -> Texts:
    """The texts as numbers of the pretrained model's vocabulary, if there is one; BadInput where they cannot be had."""

    def prepare() -> str:
        shape = Shape(
            vocabulary=vocabulary_of(config, pretrained),
            vocab_size=config.vocab_size,
            max_tokens=config.max_tokens,
            in_blocks=config.data == "text",
            labelled=config.task == "classify",
        )
        try:
            return tokens.prepared(corpus_of(config), shape)
        except OSError as error:
            raise BadInput(f"{error.filename} cannot be used ({error.strerror})") from error

    mine = agreed(comm, lambda: prepare() if comm.local_rank == 0 else None)
    key = next(theirs for theirs in comm.allgather(mine) if theirs is not None)
    require_equal(comm, {"the texts and their vocabulary (SHA-256)": mine or key})
    found = agreed(comm, lambda: tokens.opened(key))
    require_equal(comm, {"the texts as numbers (SHA-256)": found.sha256})
    return found


def vocabulary_of(config: BertConfig, pretrained: Pretrained | None) -> Vocabulary | None:
    """That of the settings; None where it is to be learned."""
    given = None if config.tokenizer is None else read(config.tokenizer)
    if pretrained is None:
        return given
    if given is not None:
        pretrained.require_vocabulary(given, str(config.tokenizer))
    return pretrained.vocabulary
