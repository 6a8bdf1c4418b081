"""BERTs in the states in which people publish them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hvdtrain.bert import build
from hvdtrain.tasks.text.model import BertForClassification
from hvdtrain.tasks.text.pretrained import read_pretrained
from hvdtrain.tasks.text.settings import finetune
from hvdtrain.tasks.text.tokenizer_files import read_vocabulary
from hvdtrain.tasks.text.vocabulary import Vocabulary
from hvdtrain.tasks.text.weights import load_pretrained
from tests.refusals import refused, require_facts
from tests.unit.tasks.text.berts import LABELS, SIZES, VOCABULARY, classifier, masked_lm, saved

ADDED = len(VOCABULARY)  # the number of the first added token


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "model", masked_lm())


def put(folder, **documents):
    """Write JSON files; those of config.json and tokenizer_config.json change what is there."""
    for name, document in documents.items():
        path = folder / f"{name}.json"
        if name.endswith("config") and path.exists():
            document = {**json.loads(path.read_text()), **document}  # noqa: PLW2901
        path.write_text(json.dumps(document))


def loaded(folder, model):
    load_pretrained(model, read_pretrained(folder, "p"))
    return model.state_dict()


def is_whole(folder):
    return all(map(torch.equal, loaded(folder, masked_lm(seed=1)).values(), masked_lm().state_dict().values()))


def encoded(folder, text):
    vocabulary = read_vocabulary(folder, "p")
    return [vocabulary.tokens[number] for number in vocabulary.encoder()([text])[0]]


def test_a_model_may_have_many_more_embeddings_than_tokens(tmp_path):
    model = masked_lm(sizes=replace(SIZES, vocabulary=ADDED + 1000))
    folder = saved(tmp_path / "model", model)
    found = read_pretrained(folder, "p")
    assert (len(found.vocabulary.tokens), found.sizes.vocabulary) == (ADDED, ADDED + 1000)
    require_facts(" ".join(found.remarks), "p has ... 1,015 ... 15")
    words = loaded(folder, masked_lm(seed=1, sizes=found.sizes))["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(words, model.bert.embeddings.word_embeddings.weight)
    assert read_pretrained(saved(tmp_path / "even", masked_lm()), "p").remarks == []


# Weights


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module.model."])
def test_what_was_around_a_saved_model_is_no_part_of_its_names(folder, prefix):
    file = folder / "model.safetensors"
    save_file({prefix + name: weight for name, weight in load_file(file).items()}, file)
    assert is_whole(folder)


def divide(folder, *, pickled):
    """Write the weights into two files and an index."""
    name, save = ("pytorch_model.bin", torch.save) if pickled else ("model.safetensors", save_file)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = name.split(".")
    parts = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    file_of = {weight: parts[place % 2] for place, weight in enumerate(sorted(weights))}
    for part in parts:
        save({weight: weights[weight] for weight in weights if file_of[weight] == part}, folder / part)
    index = folder / f"{name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return index, parts


@pytest.mark.parametrize("pickled", [False, True])
def test_weights_may_be_several_files(folder, pickled):
    _, parts = divide(folder, pickled=pickled)
    assert is_whole(folder)
    (folder / parts[1]).write_bytes(b"torn")
    require_facts(refused(lambda: is_whole(folder)), f"--pretrained p: {parts[1]} is truncated")
    (folder / parts[1]).unlink()
    require_facts(refused(lambda: is_whole(folder)), f"--pretrained p: ... index.json names {parts[1]} ... missing")


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": []}, *({"weight_map": {"a": name}} for name in ("../other.bin", "", ".."))],
)
def test_an_index_of_no_files_is_refused(folder, index):
    path, _ = divide(folder, pickled=False)
    (folder.parent / "other.bin").write_bytes(b"")
    path.write_text(json.dumps(index))
    require_facts(refused(lambda: is_whole(folder)), "--pretrained p: model.safetensors.index.json")


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, (0.0, 0.0, 0.0)), ({"classifier_dropout": 0.5, "hidden_dropout_prob": 0.2}, (0.2, 0.0, 0.5)),
     ({"attention_probs_dropout_prob": 0.3, "classifier_dropout": None}, (0.0, 0.3, 0.0))],
)  # fmt: skip
def test_attention_and_the_classifier_may_have_dropouts_of_their_own(tmp_path, config, expected):
    folder = saved(tmp_path / "model", classifier())
    put(folder, config=config)
    for _ in range(2):  # as published, and as exported again
        model = BertForClassification(read_pretrained(folder, "p").sizes, 3)
        attention = model.bert.encoder["layer"][0].attention["self"]._dropout
        assert (model.bert.embeddings.dropout.p, attention, model.dropout.p) == expected
        folder = saved(tmp_path / "again", model)


def test_the_option_replaces_every_dropout(tmp_path):
    folder = saved(tmp_path / "model", classifier())
    put(folder, config={"attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.5})
    texts = SimpleNamespace(vocabulary=Vocabulary(tokens=VOCABULARY), labels=LABELS)
    model = build(replace(finetune(), dropout=0.25), texts, read_pretrained(folder, "p"))
    attention = model.bert.encoder["layer"][0].attention["self"]._dropout
    assert {attention, *(layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout))} == {0.25}


# Tokens


def test_of_equal_lines_the_last_one_is_the_token(tmp_path):
    folder = saved(tmp_path / "model", masked_lm(sizes=replace(SIZES, vocabulary=ADDED + 3)))
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in (*VOCABULARY, "eye", "", "")))
    found = read_pretrained(folder, "p").vocabulary
    assert found.encoder()(["left eye"]) == [[VOCABULARY.index("left"), ADDED]]
    assert (found.id("eye"), len(found.tokens)) == (ADDED, ADDED + 3)
    put(folder, tokenizer_config={"eos_token": "<e>"})
    require_facts(refused(lambda: read_pretrained(folder, "p")), "--pretrained p: added tokens ... a token twice")


def test_of_two_that_differ_in_case_the_second_is_taken_literally(folder):
    """The library would take either of them, another one in each process."""
    put(folder, added_tokens={"<e>": ADDED, "<E>": ADDED + 1})
    assert {tuple(encoded(folder, "<e><E>")) for _ in range(20)} == {("<e>", "<E>")}


def one_file(pre_tokenizer=None, **model):
    """A tokenizer.json, of which the class of the tokenizer takes all."""
    numbers = {token: number for number, token in enumerate(VOCABULARY)}
    return {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "tokenizer": {
            "normalizer": {"type": "BertNormalizer", "lowercase": True},
            "pre_tokenizer": pre_tokenizer or {"type": "BertPreTokenizer"},
            "model": {"type": "WordPiece", "vocab": numbers, **model},
        },
    }


def test_a_class_that_takes_all_from_one_file_takes_the_case_from_it(folder):
    put(folder, **one_file())
    put(folder, tokenizer_config={"do_lower_case": False})
    assert read_vocabulary(folder, "p").lower_case


@pytest.mark.parametrize(
    ("documents", "facts"),
    [
        ({"added_tokens": {"<e>": ADDED + 1}}, f"'<e>' has the number {ADDED + 1} instead of {ADDED}"),
        ({"added_tokens": {"eye": ADDED}}, f"'eye' has the number {ADDED} instead of {VOCABULARY.index('eye')}"),
        ({"added_tokens": {"<e>": "x"}}, "added tokens cannot be read"),
        ({"tokenizer_config": {"added_tokens_decoder": {"9": {"special": True}}}}, "added tokens cannot be read"),
        ({"tokenizer_config": {"added_tokens_decoder": ["x"]}}, "added tokens cannot be read"),
        ({"added_tokens": {"<e>": ADDED}}, "16 tokens and the model 15"),
        ({"tokenizer_config": {"word_tokenizer_type": "mecab"}}, "word_tokenizer_type 'mecab'"),
        (one_file(pre_tokenizer={"type": "Whitespace"}), "the pre_tokenizer of tokenizer.json has type 'Whitespace'"),
        (one_file(max_input_chars_per_word=20), "the model of tokenizer.json has max_input_chars_per_word 20"),
    ],
)
def test_a_tokenizer_that_the_model_cannot_have_is_refused(folder, documents, facts):
    put(folder, **documents)
    require_facts(refused(lambda: read_pretrained(folder, "p")), f"--pretrained p: ... {facts}")


@pytest.mark.parametrize("name", ["", "vocab.txt"])
def test_a_tokenizer_is_read_as_the_one_of_a_model(folder, name):
    put(folder, added_tokens={"<e>": ADDED}, tokenizer_config={"do_lower_case": False})
    assert read_vocabulary(folder / name, "--tokenizer t") == read_vocabulary(folder, "--pretrained p")
