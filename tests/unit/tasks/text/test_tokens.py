import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hvdtrain.settings.safety import life
from hvdtrain.tasks.text import tokens
from hvdtrain.tasks.text.corpus import Corpus
from hvdtrain.tasks.text.formats import Row
from hvdtrain.tasks.text.tokens import Shape
from hvdtrain.tasks.text.vocabulary import SPECIALS, Added, Vocabulary, learn_vocabulary
from tests.refusals import refused, require_facts

WORDS = Vocabulary(tokens=(*SPECIALS, "one", "two", "three", "##s"))
TRAIN = [Row(text="One, twos", label="b"), Row(text="three", label="a"), Row(text="", label="b")]
TEST = [Row(text="one two three one", label="a"), Row(text="two", label="b")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hvdtrain" / "tokens"


def corpus(train=TRAIN, test=TEST, key="k"):
    return Corpus(train=lambda: iter(train), test=lambda: iter(test), key=lambda: key)


def shape(vocabulary=WORDS, *, max_tokens=16, in_blocks=False, labelled=True, vocab_size=60):
    return Shape(
        vocabulary=vocabulary, vocab_size=vocab_size, max_tokens=max_tokens, in_blocks=in_blocks, labelled=labelled
    )


def texts_of(rows=None, **options):
    return tokens.open_texts(tokens.prepare(rows or corpus(), shape(**options)))


def in_tokens(texts, split):
    """The sequences of a split as tokens, without what fills up the batch."""
    [batch] = split.batches([torch.arange(len(split))], torch.device("cpu"), None)
    words = texts.vocabulary.tokens
    return [
        " ".join(words[number] for number in row[:length])
        for row, length in zip(batch["tokens"].tolist(), batch["lengths"].tolist(), strict=True)
    ]


def test_texts_become_the_numbers_of_their_tokens_and_the_test_is_sorted_by_length():
    texts = texts_of()
    assert in_tokens(texts, texts.train) == ["[CLS] one [UNK] two ##s [SEP]", "[CLS] three [SEP]", "[CLS] [SEP]"]
    assert in_tokens(texts, texts.test) == ["[CLS] two [SEP]", "[CLS] one two three one [SEP]"]
    assert texts.labels == ("a", "b")
    [batch] = texts.test.batches([torch.arange(2)], torch.device("cpu"), None)
    assert batch["labels"].tolist() == [1, 0]
    assert texts.cut_count == 0


def test_special_tokens_in_a_text_are_text():
    rows = [Row(text="[SEP] two", label="a"), Row(text="one [MASK]", label="b")]
    texts = texts_of(corpus(rows), vocabulary=Vocabulary(tokens=(*WORDS.tokens, "[", "]", "sep", "mask")))
    assert in_tokens(texts, texts.train) == ["[CLS] [ sep ] two [SEP]", "[CLS] one [ mask ] [SEP]"]


def test_added_tokens_are_kept(tmp_path):
    added = (Added(content="\n", normalized=False), Added(content="<e>", special=True))
    vocabulary = Vocabulary(tokens=(*WORDS.tokens, "\n", "<e>"), pieces=len(WORDS.tokens), added=added)
    rows = [Row(text="one\n two<e>", label=label) for label in "ab"]
    texts = texts_of(corpus(rows, rows), vocabulary=vocabulary)
    assert texts.vocabulary == vocabulary
    assert in_tokens(texts, texts.train) == ["[CLS] one \n two <e> [SEP]"] * 2
    assert texts_of(corpus(rows, rows)).vocabulary == WORDS


def test_a_person_sees_how_far_the_reading_is(monkeypatch):
    shown = []
    monkeypatch.setattr(life, "doing", shown.append)
    texts_of(vocabulary=None)
    texts = [one.text() for one in shown if one is not None]
    for what in ("learning the vocabulary: ", "reading texts: "):
        assert any(text.startswith(what) and text.endswith(" rows") for text in texts)


def test_long_texts_are_cut_or_become_several_sequences():
    cut = texts_of(max_tokens=4)
    assert in_tokens(cut, cut.train)[0] == "[CLS] one [UNK] [SEP]"
    assert cut.cut_count == 2
    blocks = texts_of(max_tokens=4, in_blocks=True, labelled=False)
    assert in_tokens(blocks, blocks.train) == ["[CLS] one [UNK] [SEP]", "[CLS] two ##s [SEP]", "[CLS] three [SEP]"]
    assert blocks.cut_count == 0


@pytest.mark.parametrize(
    ("max_tokens", "whole"),
    [
        (16, "[CLS] one one one [SEP] two two two two two [SEP]"),
        (8, "[CLS] one one one [SEP] two two [SEP]"),
        (7, "[CLS] one one [SEP] two two [SEP]"),
    ],
)
def test_of_a_pair_the_longer_one_is_cut_first(max_tokens, whole):
    rows = [Row(text="one one one", pair="two two two two two", label=label) for label in "ab"]
    texts = texts_of(corpus(rows, rows), max_tokens=max_tokens)
    assert in_tokens(texts, texts.train) == [whole, whole]
    assert texts.cut_count == (0 if max_tokens == 16 else 4)


@pytest.mark.parametrize("labels", ["2 9 10 x", "-1.5 0 1e1 inf nan x", "01 1 1.0"])
def test_labels_are_in_order_numbers_by_size(labels):
    expected = tuple(labels.split())
    rows = [Row(text="one", label=label) for label in sorted(expected, reverse=True)]
    assert texts_of(corpus(rows, rows)).labels == expected


@pytest.mark.parametrize(
    ("spellings", "names"),
    [
        ("0 1 0.0 1.0 true False", "0 1"),
        ("-1.0 0 1 2.0", "-1 0 1 2"),
        ("TRUE true False", "False True"),
        ("yes 0 true", "0 1"),
        ("yes no maybe", "maybe no yes"),
        ("3.0 3 3.1", "3 3.0 3.1"),
        ("1 2 true", "1 2 true"),
        ("- +", "+ -"),
    ],
)
def test_spellings_of_a_number_are_one_label(spellings, names):
    rows = [Row(text="one", label=label) for label in spellings.split()]
    texts = texts_of(corpus(rows, rows))
    assert texts.labels == tuple(names.split())
    [batch] = texts.train.batches([torch.arange(len(rows))], torch.device("cpu"), None)
    expected = [texts.labels.index(tokens.label_spellings(spellings.split())[row.label]) for row in rows]
    assert batch["labels"].tolist() == expected


def test_texts_without_a_label_are_left_out_and_counted():
    rows = [*TRAIN, Row(text="zzz")]
    texts = texts_of(corpus(rows, [Row(text="zzz"), *TEST]), vocabulary=None)
    assert (len(texts.train), len(texts.test)) == (len(TRAIN), len(TEST))
    assert "z" not in texts.vocabulary.tokens
    assert texts.remarks[0].startswith("2 texts are left out")
    assert len(texts_of(corpus(rows, rows), labelled=False).train) == len(rows)


def test_what_texts_lose_is_remarked():
    rows = [Row(text="zzz one two", label=label) for label in ("-1", "0", "1")]
    found = Corpus(train=lambda: iter(rows), test=lambda: iter(rows), key=lambda: "r", remarks=("on the test",))
    facts = "on the test ... -1 is one of the labels ... 6 texts are cut off after --max-tokens 4 ... 25.00% ... [UNK]"
    require_facts("\n".join(texts_of(found, max_tokens=4).remarks), facts)


def test_a_vocabulary_is_learned_from_the_training_texts_alone():
    rows = corpus([Row(text="aaa aaa ab", label=label) for label in "xy"], [Row(text="aaa zz", label="x")])
    texts = texts_of(rows, vocabulary=None)
    assert texts.vocabulary.tokens[:5] == SPECIALS
    assert {"a", "b", "##a", "##b", "aaa"} <= set(texts.vocabulary.tokens)
    assert in_tokens(texts, texts.test) == ["[CLS] aaa [UNK] [SEP]"]


@pytest.mark.parametrize(("size", "letters"), [(7000, 2997), (2500, 1247), (2005, 1000)])
def test_of_a_script_with_many_letters_as_many_are_tokens_as_there_is_room_for(size, letters):
    """3,000 of them; the last three are 0.05 % of the text."""
    script = [chr(0x4E00 + number) for number in range(3000)]
    found = learn_vocabulary(lambda: ["".join(script), 3000 * script[0]], size)
    assert len(set(script) & set(found.tokens)) == letters


def test_the_share_of_unknown_tokens_is_known():
    assert texts_of().unknown_share == 1 / (6 + 3 + 2 + 6 + 3)
    known = [Row(text="one", label=label) for label in "ab"]
    assert texts_of(corpus(known, known, key="known")).unknown_share == 0


def test_numbers_take_two_bytes_or_with_many_tokens_four(cache):
    many = Vocabulary(tokens=(*SPECIALS, *(f"w{number}" for number in range(2**16)), "one"))
    texts = texts_of(vocabulary=many, max_tokens=8)
    assert in_tokens(texts, texts.train)[0].startswith("[CLS] one")
    sizes = {json.loads(path.read_text())["dtype"] for path in cache.glob("*/about.json")}
    assert sizes == {"<u4"}
    texts_of()
    assert {json.loads(path.read_text())["dtype"] for path in cache.glob("*/about.json")} == {"<u4", "<u2"}


def test_they_are_made_once_for_the_same_content_and_anew_for_another(cache):
    first = tokens.prepare(corpus(), shape())
    made = (cache / first / "tokens.bin").stat()
    assert tokens.prepare(corpus(train=[]), shape()) == first  # nothing is read
    assert (cache / first / "tokens.bin").stat() == made
    others = [
        tokens.prepare(corpus(key="other"), shape()),
        tokens.prepare(corpus(), shape(max_tokens=8)),
        tokens.prepare(corpus(), shape(labelled=False)),
        tokens.prepare(corpus(), shape(vocabulary=None)),
    ]
    assert len({first, *others}) == 5
    assert sorted(path.name for path in cache.iterdir()) == sorted({first, *others})


def test_a_file_that_is_changed_while_it_is_read_is_refused(cache):
    keys = iter(["before", "after"])
    changing = Corpus(train=lambda: iter(TRAIN), test=lambda: iter(TEST), key=lambda: next(keys))
    require_facts(refused(lambda: tokens.prepare(changing, shape())), "--data-dir: ... changed")
    assert list(cache.iterdir()) == []


def test_for_masked_words_each_text_of_a_pair_is_a_sequence():
    """Of what is inside a sequence anything may be masked: no [SEP] is there."""
    pairs = [Row(text="one two", pair="three", label="a"), Row(text="two", label="b")]
    texts = texts_of(corpus(pairs, pairs), labelled=False)
    assert in_tokens(texts, texts.train) == ["[CLS] one two [SEP]", "[CLS] three [SEP]", "[CLS] two [SEP]"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.bin", "changed"),
        ("offsets.npy", "cut"),
        ("labels.npy", "gone"),
        ("vocab.txt", "changed"),
        ("about.json", "gone"),
        ("about.sha256", "cut"),
    ],
)
def test_a_torn_cache_is_refused_by_name(cache, name, damage):
    key = tokens.prepare(corpus(), shape())
    path = cache / key / name
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    line = refused(lambda: tokens.prepare(corpus(), shape()))
    require_facts(line, f"{cache / key}: damaged ... {name} ... Delete this folder")


def test_another_description_than_was_written_is_refused(cache):
    key = tokens.prepare(corpus(), shape())
    about = cache / key / "about.json"
    about.write_text(about.read_text().replace('"a"', '"c"'))
    for read in (lambda: tokens.prepare(corpus(), shape()), lambda: tokens.open_texts(key)):
        require_facts(refused(read), f"{cache / key}: damaged ... about.json or about.sha256")


def test_others_may_read_what_was_made_as_far_as_the_umask_lets_them(cache):
    before = os.umask(0o022)
    try:
        folder = cache / tokens.prepare(corpus(), shape())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_tokens_that_another_has_locked_away_are_not_called_damaged(cache, monkeypatch):
    key = tokens.prepare(corpus(), shape())

    def locked(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", locked)
    for read in (lambda: tokens.prepare(corpus(), shape()), lambda: tokens.open_texts(key)):
        require_facts(refused(read), f"{cache / key / 'about.json'}: ... Permission denied ... XDG_CACHE_HOME")


def test_what_killed_processes_have_begun_is_removed_after_a_day(cache):
    for name, days in ((".part-dead", 2), (".part-alive", 2), (".part-new", 0)):
        (cache / name).mkdir(parents=True)
        for path in (cache / name / "tokens.bin", cache / name / "old"):
            path.write_text("half")
        old = time.time() - days * 24 * 3600
        for path in (*(cache / name).iterdir(), cache / name):
            os.utime(path, (old, old))
    (cache / ".part-alive" / "tokens.bin").write_text("still written to")
    os.utime(cache / ".part-alive", (0, 0))
    key = tokens.prepare(corpus(), shape())
    assert {path.name for path in cache.iterdir()} == {".part-alive", ".part-new", key}


def test_nothing_is_left_of_texts_that_are_refused(cache):
    one_label = [Row(text="one", label="a")]
    require_facts(refused(lambda: texts_of(corpus(one_label))), "training texts: 1 labels ... two")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("train", "test", "named"),
    [
        ([], TEST, "--data: 0 training ... 2 test texts"),
        (TRAIN, [], "--data: 3 training ... 0 test texts"),
        (TRAIN, [Row(text="one", label="-1")], "test texts: label '-1'"),
        ([*TRAIN, Row(text="one", label="B")], TEST, "training texts: labels 'B' and 'b' ... case"),
        ([*TRAIN, Row(text="one", label="-")], TEST, "training texts: label '-'"),
    ],
)
def test_texts_that_cannot_be_learned_are_refused(train, test, named):
    require_facts(refused(lambda: texts_of(corpus(train, test))), named)


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in refused(texts_of)


def test_a_vocabulary_without_room_for_the_letters_is_refused():
    assert refused(lambda: texts_of(vocabulary=None, vocab_size=20)).startswith("--vocab-size 20: the ")


MAKE = """
import random
from hvdtrain.tasks.text import tokens
from hvdtrain.tasks.text.corpus import Corpus
from hvdtrain.tasks.text.formats import Row

random.seed(1)
words = ["".join(random.choices("abcdefgh", k=random.randint(1, 6))) for _ in range(2000)]
rows = [Row(text=" ".join(random.choices(words, k=20)), label=str(number % 3)) for number in range(300)]
corpus = Corpus(train=lambda: iter(rows), test=lambda: iter(rows), key=lambda: "k")
shape = tokens.Shape(vocabulary=None, vocab_size=200, max_tokens=16, in_blocks=False, labelled=True)
print(tokens.open_texts(tokens.prepare(corpus, shape)).sha256)
"""


def test_processes_make_the_same_vocabulary_and_tokens(tmp_path, capsys):
    """Words of few letters at random: many pairs are equally frequent, and hashes are each process's own."""
    exec(MAKE, {})  # noqa: S102 (as the other process does)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "other"), "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", MAKE], env=environment, check=True, capture_output=True, text=True)
    assert len(other.stdout.strip()) == 64
    assert other.stdout == capsys.readouterr().out
