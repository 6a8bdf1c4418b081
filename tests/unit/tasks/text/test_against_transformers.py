"""Our BERT against transformers' own, which is installed for tests alone: its import takes seconds."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.text.export import export
from hvdtrain.tasks.text.model import BertForClassification
from hvdtrain.tasks.text.pretrained import pretrained_on_all, read_pretrained
from hvdtrain.tasks.text.tokenizer_files import read_vocabulary
from hvdtrain.tasks.text.weights import load_pretrained
from tests.unit.tasks.text.berts import LABELS, SIZES, VOCABULARY, batch, classifier, masked_lm, saved, unlike

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours


@pytest.fixture(scope="module")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def theirs(transformers, kind, **changes):
    """Random weights, no two alike."""
    config = transformers.BertConfig(
        vocab_size=SIZES.vocabulary,
        hidden_size=SIZES.width,
        num_hidden_layers=SIZES.layers,
        num_attention_heads=SIZES.heads,
        intermediate_size=SIZES.intermediate,
        max_position_embeddings=SIZES.positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=SIZES.initializer_range,
        num_labels=len(LABELS),
        **changes,
    )
    torch.manual_seed(7)
    return unlike(getattr(transformers, kind)(config))


def their_logits(model):
    tokens, types, mask = batch()
    found = model(input_ids=tokens, token_type_ids=types, attention_mask=mask.long())
    return found.prediction_logits if "prediction_logits" in found else found.logits


def our_logits(model):
    tokens, types, mask = batch()
    if "cls.predictions.bias" not in model.state_dict():
        return model(tokens, types, mask)
    return model(tokens, types, mask, torch.arange(mask.numel())).unflatten(0, mask.shape)


def difference(one, other):
    """The largest, at real tokens."""
    mask = batch()[2] if one.ndim == 3 else slice(None)
    assert other[mask].std() > 0.3  # they tell something
    return (one[mask] - other[mask]).abs().max().item()


def folder_of(model, folder):
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def ours(folder, model):
    load_pretrained(model, pretrained_on_all(SerialComm(), str(folder)))
    return model


@pytest.mark.parametrize(
    ("kind", "build"), [("BertForMaskedLM", masked_lm), ("BertForSequenceClassification", classifier)]
)
def test_logits_and_gradients_are_theirs(transformers, tmp_path, kind, build):
    model = theirs(transformers, kind)
    own = ours(folder_of(model, tmp_path / "model"), build())
    both = our_logits(own), their_logits(model)
    assert difference(*both) < 1e-5
    mask = batch()[2] if build is masked_lm else slice(None)
    for logits in both:
        real = logits[mask]
        functional.cross_entropy(real, torch.arange(len(real)) % 3, reduction="sum").backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.pop(name), rtol=1e-4, atol=1e-5, msg=name)
    assert not expected


@pytest.mark.parametrize(
    ("auto", "build", "labels"),
    [("AutoModelForMaskedLM", masked_lm, ()), ("AutoModelForSequenceClassification", classifier, LABELS)],
)
def test_an_export_is_loaded_by_transformers(transformers, tmp_path, auto, build, labels):
    folder = saved(tmp_path / "out", build(seed=4), labels=labels)
    model, report = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(our_logits(build(seed=4)), their_logits(model.eval())) < 1e-5
    if labels:
        assert [model.config.id2label[number] for number in range(3)] == list(LABELS)
        assert model.config.label2id == {label: number for number, label in enumerate(LABELS)}


@pytest.mark.parametrize("lower_case", [True, False])
def test_an_export_has_its_tokenizer(transformers, tmp_path, lower_case):
    folder = saved(tmp_path / "out", masked_lm(), lower_case=lower_case)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = tokenizer("Feverish fractures of the eye", "left")
    fever = "fever" if lower_case else "Fever"
    words = ["[CLS]", fever, "##ish", "fracture", "##s", "of", "the", "eye", "[SEP]", "left", "[SEP]"]
    assert found["input_ids"] == [VOCABULARY.index(word) for word in words]
    assert found["token_type_ids"] == [0] * 9 + [1] * 2
    assert tokenizer.model_max_length == SIZES.positions
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id


FLAGS = [
    {"content": "[E1]", "special": True},
    {"content": "Sinusitis", "single_word": True},
    {"content": "eye", "lstrip": True, "rstrip": True, "normalized": False},
    {"content": "\u00c9ver", "rstrip": True},
]
NUMBERS = {token["content"]: number for number, token in enumerate(FLAGS[:2], len(VOCABULARY))} | {"eye": 11}
TEXTS = (
    "[E1] fever [e1]s",
    "sinusitis SINUSITIS Sinusitises",
    " eye eyes\teye  Eye",
    "f\u00c9ver, \u00e9ver everything",
)


def one_file(transformers, folder, *, kept=(), **options):
    """A tokenizer as transformers saves it now, with other files `kept` by earlier versions."""
    tokenizer = transformers.BertTokenizer({word: number for number, word in enumerate(VOCABULARY)}, **options)
    tokenizer.add_tokens([transformers.AddedToken(**token) for token in FLAGS])
    tokenizer.save_pretrained(folder)
    for name in kept:
        (folder / name).write_text("".join(f"{word}\n" for word in VOCABULARY))


@pytest.mark.parametrize("lower_case", [True, False])
@pytest.mark.parametrize(
    "documents",
    [
        {"added_tokens": NUMBERS},
        {"added_tokens": NUMBERS, "special_tokens_map": {"additional_special_tokens": ["[E1]", "Sinusitis", "<x>"]}},
        {"added_tokens": NUMBERS, "special_tokens_map": {"bos_token": "[E1]", "mask_token": FLAGS[0]}},
        {"tokenizer_config": {"extra_special_tokens": ["eye"], "eos_token": "Sinusitis", "bos_token": "[E1]"}},
        {
            "tokenizer_config": {"added_tokens_decoder": {str(11 + 4 * (n < 2) + n % 2): FLAGS[n] for n in range(3)}},
            "added_tokens": {"ignored": 99},
        },
        ("vocab.txt",),
        (),
    ],
)
def test_added_tokens_are_found_as_theirs(transformers, tmp_path, documents, lower_case):
    if isinstance(documents, tuple):
        one_file(transformers, tmp_path, kept=documents, do_lower_case=lower_case)
    else:
        (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in VOCABULARY))
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
        for name, document in {"tokenizer_config": {}, **documents}.items():
            content = {**settings, **document} if name == "tokenizer_config" else document
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(list(TEXTS), add_special_tokens=False)["input_ids"]
    assert any(number >= len(VOCABULARY) for numbers in expected for number in numbers)
    found = read_vocabulary(tmp_path, "--tokenizer t")
    assert found.encoder()(TEXTS) == expected
    for file in tmp_path.glob("tokenizer.json"):
        assert read_vocabulary(file, "--tokenizer t") == found
    export(tmp_path / "out", masked_lm(sizes=replace(SIZES, vocabulary=len(found.tokens))), vocabulary=found)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported(list(TEXTS), add_special_tokens=False)["input_ids"] == expected


def test_weights_that_they_divide_are_read(transformers, tmp_path):
    model = theirs(transformers, "BertForSequenceClassification", classifier_dropout=0.25)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    assert not (tmp_path / "model.safetensors").exists()
    own = BertForClassification(read_pretrained(tmp_path, "p").sizes, len(LABELS)).eval()
    assert own.dropout.p == model.dropout.p == 0.25
    assert difference(our_logits(ours(tmp_path, own)), their_logits(model)) < 1e-5
