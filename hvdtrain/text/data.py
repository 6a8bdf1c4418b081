"""The texts of a run on every rank: made into numbers by one rank of each host, the same ones on all hosts."""

from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.text import tokens
from hvdtrain.text.corpus import make_corpus
from hvdtrain.text.pretrained import Pretrained
from hvdtrain.text.settings import BertSettings
from hvdtrain.text.tokens import Shape, Texts
from hvdtrain.text.vocabulary import Vocabulary, read_vocabulary


def load_on_all(comm: Comm, config: BertSettings, pretrained: Pretrained | None) -> Texts:
    """The texts as numbers of the pretrained model's vocabulary, if there is one; BadInput where they cannot be had."""

    def prepare() -> str:
        shape = Shape(
            vocabulary=choose_vocabulary(config, pretrained),
            vocab_size=config.vocab_size,
            max_tokens=config.max_tokens,
            in_blocks=config.data == "text",
            labelled=config.task == "classify",
        )
        try:
            return tokens.prepare(make_corpus(config), shape)
        except OSError as error:
            raise BadInput(
                f"{error.filename}: cannot be used ({error.strerror}). Check the path and its permissions."
            ) from error

    local_key = agree(comm, lambda: prepare() if comm.local_rank == 0 else None)
    key = next(key for key in comm.allgather(local_key) if key is not None)
    require_equal(comm, {"the texts and their vocabulary (SHA-256)": local_key or key})
    texts = agree(comm, lambda: tokens.open_texts(key))
    require_equal(comm, {"the texts as numbers (SHA-256)": texts.sha256})
    return texts


def choose_vocabulary(config: BertSettings, pretrained: Pretrained | None) -> Vocabulary | None:
    """That of the settings; None where it is to be learned."""
    vocabulary = None if config.tokenizer is None else read_vocabulary(config.tokenizer)
    if pretrained is None:
        return vocabulary
    if vocabulary is not None:
        pretrained.require_vocabulary(vocabulary, str(config.tokenizer))
    return pretrained.vocabulary
