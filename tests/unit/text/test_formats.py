import csv

import pytest

from hvdtrain.text import formats
from hvdtrain.text.formats import Columns, Row
from tests.refusals import refused, require_facts

LABELLED = Columns(text="text", pair=None, label="label")
GLUE = Columns(text=None, pair=None, label=None)


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_json_lines_may_have_more_columns_numbers_for_labels_and_a_byte_order_mark(tmp_path):
    text = '\ufeff{"text": "a\\u00e9", "label": 1, "id": 7}\n\n{"text": "b\\nc", "label": "x"}\n'
    rows = list(formats.read_json_lines(written(tmp_path, "a.jsonl", text), LABELLED))
    assert rows == [Row(text="aé", label="1"), Row(text="b\nc", label="x")]


def test_a_csv_may_quote_commas_quotes_and_line_ends(tmp_path):
    path = written(tmp_path, "a.csv", 'label,text\r\nx,"one, ""two""\nthree"\r\n\r\ny,four\r\n')
    rows = list(formats.read_table(path, LABELLED))
    assert rows == [Row(text='one, "two"\nthree', label="x"), Row(text="four", label="y")]


def test_a_cell_may_be_longer_than_the_csv_module_takes(tmp_path):
    path = written(tmp_path, "a.csv", f"label,text\nx,{'a' * 200_000}\n")
    assert len(next(formats.read_table(path, LABELLED)).text) == 200_000
    assert csv.field_size_limit() > 200_000


def test_glue_is_separated_by_tabs_and_quotes_nothing(tmp_path):
    sst2 = written(tmp_path, "train.tsv", 'sentence\tlabel\n" hide new \t0\n')
    assert list(formats.read_table(sst2, GLUE, quoted=False)) == [Row(text='" hide new ', label="0")]
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    mrpc = written(tmp_path, "msr_paraphrase_train.txt", header + '1\t7\t8\tHe "said\tHe\n')
    assert list(formats.read_table(mrpc, GLUE, quoted=False)) == [Row(text='He "said', pair="He", label="1")]


def test_a_document_is_a_block_of_lines(tmp_path):
    path = written(tmp_path, "a.txt", "\n one\ntwo \n\n  \nthree\r\n")
    assert [row.text for row in formats.read_documents(path)] == ["one two", "three"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n\n{"text": "b"}',
            "--label-column 'label': ... {}:3",
        ),
        ("a.jsonl", '{"text": "a", "label": 1}\n{', "{}:2: not valid JSON"),
        ("a.jsonl", "[" * 100_000, "{}:1: "),
        ("a.jsonl", '{"text": "a", "label": null}', "{}:1: no label ... 'label'"),
        ("a.jsonl", '{"text": "a \\ud83d", "label": 1}', "{}:1: half a character ... '\\ud83d' ... 'text'"),
        ("a.jsonl", "[1]\n", "{}:1: not a JSON object"),
        ("a.jsonl", '{"text": 1, "label": 1}', "{}:1: no text ... 'text'"),
        ("a.csv", "text,label,text\na,b,c\n", "{}: two columns ... 'text'"),
        ("a.csv", "text,class\na,b\n", "--label-column 'label': ... {} ... 'text', 'class'"),
        ("a.csv", "text,label\na,b\nc\n", "{}:3: 1 cells ... 2"),
        ("a.csv", 'text,label\n"a,b\n', "{}:2: unexpected end of data"),
        ("a.csv", b"text,label\na,b\ncaf\xe9,b\n", "{}:3: ... UTF-8 ... 0xe9 ... iconv"),
    ],
)
def test_what_is_no_row_is_named_by_file_and_line(tmp_path, name, content, named):
    path = written(tmp_path, name, content)
    reader = formats.read_json_lines if name.endswith("jsonl") else formats.read_table
    require_facts(refused(lambda: list(reader(path, LABELLED))), named.format(path))


@pytest.mark.parametrize("header", ["gj04\t1\t\tOur friends", "question1\tquestion2\tid"])
def test_an_unknown_header_of_glue_asks_for_the_columns(tmp_path, header):
    path = written(tmp_path, "train.tsv", f"{header}\n")
    assert "--text-column and --label-column" in refused(lambda: list(formats.read_table(path, GLUE, quoted=False)))


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        ("index question sentence label", "0 one two x"),  # QNLI
        ("index promptID genre sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label",
         "0 1 fiction ( ( one two y x"),  # MNLI
        ("id qid1 qid2 question1 question2 is_duplicate", "0 1 2 one two x"),  # QQP
        ("index sentence1 sentence2 label", "0 one two x"),  # RTE, WNLI
    ],
)  # fmt: skip
def test_pairs_of_glue_are_known_by_their_header(tmp_path, header, cells):
    path = written(tmp_path, "train.tsv", "\n".join(line.replace(" ", "\t") for line in (header, cells)) + "\n")
    assert list(formats.read_table(path, GLUE, quoted=False)) == [Row(text="one", pair="two", label="x")]
    unlabelled = list(formats.read_table(path, GLUE, quoted=False, labelled=False))
    assert unlabelled == [Row(text="one", pair="two")]


def test_a_column_of_labels_that_is_given_need_not_be_glues(tmp_path):
    path = written(tmp_path, "train.tsv", "sentence\tclass\none\tx\n")
    named = Columns(text=None, pair=None, label="class")
    assert list(formats.read_table(path, named, quoted=False)) == [Row(text="one", label="x")]
    assert list(formats.read_table(path, GLUE, quoted=False, labelled=False)) == [Row(text="one")]


def test_a_score_is_no_label(tmp_path):
    path = written(tmp_path, "train.tsv", "index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.8\n")
    assert "STS-B" in refused(lambda: list(formats.read_table(path, GLUE, quoted=False)))
    assert next(formats.read_table(path, GLUE, quoted=False, labelled=False)).pair == "b"


def test_a_missing_file_is_named(tmp_path):
    line = refused(lambda: list(formats.read_documents(tmp_path / "a.txt")))
    require_facts(line, f"{tmp_path / 'a.txt'}: ... No such file or directory")
