import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text import pretrained
from hvdtrain.tasks.text.pretrained import pretrained_on_all
from hvdtrain.tasks.text.weights import load_pretrained
from tests import refusals
from tests.ranks import Rank, together
from tests.unit.tasks.text.berts import LABELS, SIZES, VOCABULARY, classifier, masked_lm, saved


def read(source):
    return pretrained_on_all(SerialComm(), str(source))


def loaded(folder, model):
    load_pretrained(model, read(folder))
    return model


def equal(one, other):
    other = other.state_dict()
    return all(torch.equal(value, other[name]) for name, value in one.state_dict().items())


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "model", masked_lm())


def change_weights(folder, change, *, pickled=False):
    weights = change(load_file(folder / "model.safetensors"))
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


def aged(weights):
    """As the first BERTs were saved: other names for norms, more heads, a decoder beside the embeddings."""
    words = weights["bert.embeddings.word_embeddings.weight"]
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        next((name.replace(new, was) for new, was in old.items() if new in name), name): weight
        for name, weight in weights.items()
    }
    return renamed | {
        "cls.predictions.decoder.weight": words.clone(),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
        "cls.seq_relationship.bias": torch.zeros(2),
        "bert.pooler.dense.weight": torch.zeros(32, 32),
        "bert.pooler.dense.bias": torch.zeros(32),
        "bert.embeddings.position_ids": torch.arange(12)[None],
    }


def with_the_decoders_bias(weights):
    return {name.replace("cls.predictions.bias", "cls.predictions.decoder.bias"): one for name, one in weights.items()}


@pytest.mark.parametrize(("change", "pickled"), [(aged, False), (aged, True), (with_the_decoders_bias, False)])
def test_an_old_file_of_weights_is_read(folder, change, pickled):
    change_weights(folder, change, pickled=pickled)
    assert equal(loaded(folder, masked_lm(seed=1)), masked_lm())


def test_half_precision_weights_are_widened(folder):
    change_weights(folder, lambda weights: {name: weight.half() for name, weight in weights.items()})
    model = loaded(folder, masked_lm(seed=1))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.state_dict(), masked_lm().state_dict(), rtol=1e-3, atol=1e-3)


def test_a_classifier_starts_from_masked_words_with_a_head_of_its_own(folder):
    model, fresh, trunk = loaded(folder, classifier(seed=1)), classifier(seed=1), masked_lm().state_dict()
    for name, value in model.state_dict().items():
        own = name.startswith(("bert.pooler.", "classifier."))
        assert torch.equal(value, fresh.state_dict()[name] if own else trunk[name]), name


def renamed(folder, names):
    """The folder with other names for the labels."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": names}))
    return folder


def test_a_classifiers_rows_follow_the_names_of_its_labels(tmp_path):
    folder, source, order = saved(tmp_path / "model", classifier(), labels=LABELS), classifier(), [1, 0, 2]
    assert (read(folder).labels, LABELS) == (("eye", "bone", "other"),) * 2
    model = classifier(seed=1)
    load_pretrained(model, read(folder), ("bone", "eye", "other"))
    assert torch.equal(model.classifier.weight, source.classifier.weight[order])
    assert torch.equal(model.classifier.bias, source.classifier.bias[order])
    assert torch.equal(model.bert.pooler["dense"].weight, source.bert.pooler["dense"].weight)


@pytest.mark.parametrize("labels", [("eye", "bone", "skin"), tuple("1234567")])
def test_a_classifier_of_labels_with_other_names_starts_with_a_head_of_its_own(tmp_path, labels):
    model, fresh = (classifier(seed=1, classes=len(labels)) for _ in range(2))
    load_pretrained(model, read(saved(tmp_path / "model", classifier(), labels=LABELS)), labels)
    assert torch.equal(model.classifier.weight, fresh.classifier.weight)
    assert torch.equal(model.classifier.bias, fresh.classifier.bias)
    assert torch.equal(model.bert.pooler["dense"].weight, classifier().bert.pooler["dense"].weight)


@pytest.mark.parametrize("names", [None, {str(number): f"LABEL_{number}" for number in range(3)}, {"x": "a"}])
def test_a_classifier_without_names_for_its_labels_is_taken_by_number(tmp_path, names):
    folder = renamed(saved(tmp_path / "model", classifier(), labels=LABELS), names)
    model = classifier(seed=1)
    load_pretrained(model, read(folder), LABELS)
    assert equal(model, classifier())


# What is refused, in one line


def refused(folder, build=masked_lm, source=None):
    source = source or str(folder)
    return refusals.refused(lambda: loaded(source, build()), f"--pretrained {source}: ")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("config.json", "config.json cannot be read (No such file or directory)"),
        ("vocab.txt", "vocab.txt cannot be read (No such file or directory)"),
        ("model.safetensors", "neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_a_missing_file_is_named(folder, name, line):
    (folder / name).unlink()
    assert line in refused(folder)


@pytest.mark.parametrize("source", ["no/such/folder", "/no/such", "a b"])
def test_what_is_neither_a_folder_nor_a_name_on_the_hub(source):
    assert "no such folder" in refused(None, source=source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_torn_file_is_named(folder, name, share):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(share * len(whole))])
    assert name in refused(folder)


class Payload:
    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_pickled_code_is_refused_and_not_run(folder):
    change_weights(folder, lambda weights: {**weights, "more": Payload()}, pickled=True)
    assert "pytorch_model.bin" in refused(folder)
    assert not Payload.ran


@pytest.mark.parametrize("document", [{"weight": 3}, {1: torch.ones(1)}])
def test_a_pickle_of_something_else_is_refused(folder, document):
    change_weights(folder, lambda _: document, pickled=True)
    assert "state dict" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "roberta"),
        ("layer_norm_eps", 1e-5),
        ("is_decoder", True),
        ("attention_probs_dropout_prob", "0.3"),
        ("vocab_size", "15"),
        ("hidden_size", 0),
        ("type_vocab_size", 1),
        ("num_attention_heads", 5),
    ],
)
def test_a_config_of_something_else_is_refused(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    message = refused(folder)
    assert "config.json" in message
    assert key in message or "heads" in message


def test_the_first_configs_say_less(folder):
    config = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "architectures", "layer_norm_eps", "type_vocab_size", "pad_token_id"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").unlink()
    found = read(folder)
    assert (found.sizes, found.vocabulary.lower_case) == (SIZES, True)


def test_a_vocabulary_without_a_special_token_is_refused(folder):
    (folder / "vocab.txt").write_text("\n".join(word for word in VOCABULARY if word != "[MASK]") + "\n")
    assert "lacks [MASK]" in refused(folder)


def test_a_vocabulary_may_leave_room_and_may_end_its_lines_otherwise(folder):
    (folder / "vocab.txt").write_bytes("\r\n".join(VOCABULARY[:-2]).encode())
    assert read(folder).vocabulary.tokens == VOCABULARY[:-2]


def in_one_file(tokens, kind="WordPiece", first=0, normalizer=None):
    model = {"type": kind, "vocab": {word: first + place for place, word in enumerate(tokens)}}
    return json.dumps({"normalizer": normalizer, "model": model})


@pytest.mark.parametrize(
    ("settings", "normalizer", "expected"),
    [
        ({}, {"lowercase": True, "strip_accents": False}, (True, False)),
        (None, {"lowercase": False, "strip_accents": None}, (False, None)),
        ({"do_lower_case": True}, {"lowercase": False, "strip_accents": None}, (True, None)),  # transformers' rule
        ({"do_lower_case": False, "strip_accents": True}, {"lowercase": True}, (False, True)),
    ],
)
@pytest.mark.parametrize("in_lines", [False, True])
def test_case_and_accents_are_those_of_the_one_file_where_the_settings_are_silent(
    folder, settings, normalizer, expected, in_lines
):
    if not in_lines:
        (folder / "vocab.txt").unlink()
    (folder / "tokenizer_config.json").unlink()
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(in_one_file(VOCABULARY, normalizer={"type": "BertNormalizer", **normalizer}))
    found = read(folder).vocabulary
    assert (found.tokens, (found.lower_case, found.strip_accents)) == (VOCABULARY, expected)


@pytest.mark.parametrize(
    ("normalizer", "named"),
    [
        (None, "type None, and only 'BertNormalizer'"),
        ({"type": "BertNormalizer", "handle_chinese_chars": False}, "handle_chinese_chars False"),
    ],
)
def test_another_normalizer_is_refused(folder, normalizer, named):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(in_one_file(VOCABULARY, normalizer=normalizer))
    assert f"the normalizer of tokenizer.json has {named}" in refused(folder)


@pytest.mark.parametrize(
    "content",
    [
        '{"model": 3}',
        '{"model": {"type": "WordPiece", "vocab": {"a": [0]}}}',
        in_one_file(VOCABULARY, kind="BPE"),
        in_one_file(VOCABULARY, first=1),
        in_one_file(VOCABULARY)[:-9],
    ],
)
def test_another_kind_of_vocabulary_is_refused(folder, content):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {name: one for name, one in weights.items() if "layer.1.output.dense.bias" not in name},
        lambda weights: {name: one for name, one in weights.items() if not name.startswith("cls.")},
        lambda weights: {**weights, "bert.encoder.layer.2.output.dense.bias": torch.zeros(32)},
        lambda weights: {**weights, "bert.embeddings.LayerNorm.bias": torch.zeros(31)},
        lambda _: {},
    ],
    ids=["incomplete", "no head", "one more", "other shape", "empty"],
)
def test_weights_of_another_model_are_refused(folder, change):
    change_weights(folder, change)
    assert "weights of another model" in refused(folder)


def test_a_decoder_of_its_own_is_refused(folder):
    change_weights(folder, lambda weights: {**weights, "cls.predictions.decoder.weight": torch.ones(15, 32)})
    assert "differs from the word embeddings" in refused(folder)


def test_a_sequence_longer_than_the_model_is_refused(folder):
    found = read(folder)
    found.require_positions(12)
    with pytest.raises(BadInput, match=r"^--max-tokens 13: --pretrained .* has 12 positions"):
        found.require_positions(13)


def test_hosts_must_have_the_same_model(tmp_path, monkeypatch):
    for name in ("0", "1"):  # one host lower-cases, the other does not
        saved(tmp_path / name / "model", masked_lm(), lower_case=name == "0")
    monkeypatch.setattr(
        pretrained, "fetch_folder", lambda source, **_: tmp_path / threading.current_thread().name / source
    )

    def on_host(comm):
        threading.current_thread().name = str(comm.rank)
        return pretrained_on_all(comm, "model")

    with pytest.raises(BadInput, match=r"^ranks disagree on what --pretrained model is .SHA-256.: rank 0 on "):
        together(2, on_host)


def test_one_rank_of_each_host_downloads(monkeypatch, folder):
    asked = []

    def fetch_folder(source, *, offline=False):
        asked.append(offline)
        return folder

    monkeypatch.setattr(pretrained, "fetch_folder", fetch_folder)
    pretrained_on_all(Rank(0, 4, local_rank=0, local_size=2), "name")
    pretrained_on_all(Rank(1, 4, local_rank=1, local_size=2), "name")
    assert asked == [False, True, True]


def test_a_host_that_cannot_read_it_is_named(folder):
    comm = Rank(0, 2, answers=[[["here", None], ["there", "--pretrained x: no such folder"]]])
    with pytest.raises(BadInput, match=r"^rank 1 on there: --pretrained x: no such folder$"):
        pretrained_on_all(comm, str(folder))
