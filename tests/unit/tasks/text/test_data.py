from dataclasses import replace

import pytest

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.text import data, tokens
from hvdtrain.tasks.text.model import sizes_of
from hvdtrain.tasks.text.pretrained import Pretrained
from hvdtrain.tasks.text.settings import tiny
from hvdtrain.tasks.text.vocabulary import SPECIALS, Vocabulary
from tests import texts
from tests.ranks import Rank, together
from tests.refusals import refused, require_facts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def settings(folder, **changes):
    return replace(tiny(), data="json", data_dir=texts.put(folder / "texts"), vocab_size=200, **changes)


def pretrained(folder, words):
    vocabulary = Vocabulary(tokens=(*SPECIALS, *words))
    sizes = sizes_of("bert_tiny", vocabulary=len(vocabulary.tokens))
    return Pretrained(source="p", folder=folder, sizes=sizes, vocabulary=vocabulary)


def test_one_rank_of_a_host_makes_what_all_of_them_map(tmp_path, monkeypatch, capsys):
    made = []
    prepared = tokens.prepare
    monkeypatch.setattr(tokens, "prepare", lambda *given: made.append(given) or prepared(*given))
    config = settings(tmp_path)
    found = together(3, lambda comm: data.load_on_all(comm, config, None))
    assert len(made) == 1
    [line] = capsys.readouterr().err.splitlines()
    require_facts(
        line, f"hvdtrain: note: --data-dir {tmp_path / 'texts'}: train is 'train.jsonl', test is 'test.jsonl'"
    )
    assert len({one.sha256 for one in found}) == 1
    assert [(len(one.train), len(one.test), one.labels) for one in found] == [
        (48, 12, ("animals", "plants", "stones"))
    ] * 3


def test_hosts_with_other_texts_are_refused(tmp_path):
    def answers(value):
        if isinstance(value, list) and isinstance(value[1], dict):
            return [value, ["other", dict.fromkeys(value[1], "another")]]
        return [value, value]

    comm = Rank(0, 2, answers=answers)
    line = refused(lambda: data.load_on_all(comm, settings(tmp_path), None))
    assert line.startswith("ranks disagree on the texts and their vocabulary (SHA-256): rank 0 on ")


def test_the_vocabulary_of_another_model_is_refused(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join([*SPECIALS, "dog", "cat"]) + "\n")
    config = settings(tmp_path, tokenizer=file)
    assert data.load_on_all(SerialComm(), config, None).vocabulary.tokens[-1] == "cat"
    line = refused(lambda: data.load_on_all(SerialComm(), config, pretrained(tmp_path, ["cat", "dog"])))
    require_facts(line, f"--tokenizer {file}: ... --pretrained p")


def test_a_vocabulary_of_other_accents_than_the_models_is_refused(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, "cat", "dog"]) + "\n")
    config, known = settings(tmp_path, tokenizer=folder), pretrained(tmp_path, ["cat", "dog"])
    assert data.choose_vocabulary(config, known) == known.vocabulary
    (folder / "tokenizer_config.json").write_text('{"strip_accents": false}')
    line = refused(lambda: data.choose_vocabulary(config, known))
    require_facts(line, f"--tokenizer {folder}: ... --pretrained p ... case")
