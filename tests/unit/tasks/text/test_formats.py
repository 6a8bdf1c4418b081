import csv
import json
from dataclasses import replace

import pytest

from hvdtrain.tasks.text import formats
from hvdtrain.tasks.text.formats import Columns, Row
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


TABLE = 'text,label\na\u00e9,x\n"b, ""c""",y\n'
ROWS = [Row(text="a\u00e9", label="x"), Row(text='b, "c"', label="y")]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_mark_gives_the_encoding_and_lines_end_as_on_any_system(tmp_path, encoding, end):
    mark = "\ufeff" if encoding.endswith("e") else ""
    table = written(tmp_path, "a.csv", (mark + TABLE.replace("\n", end)).encode(encoding))
    assert list(formats.read_table(table, LABELLED)) == ROWS
    line_per_row = "".join(json.dumps({"text": row.text, "label": row.label}) + end for row in ROWS)
    lines = written(tmp_path, "a.jsonl", (mark + line_per_row).encode(encoding))
    assert list(formats.read_json_lines(lines, LABELLED)) == ROWS
    documents = written(tmp_path, "a.txt", (mark + f"one{end}two{end}{end}three").encode(encoding))
    if end != "\r\r\n":  # between any two lines it has a blank one
        assert [row.text for row in formats.read_documents(documents)] == ["one two", "three"]


def test_a_cell_may_end_its_lines_otherwise_than_the_table(tmp_path):
    path = written(tmp_path, "a.csv", 'text,label\r"one\ntwo",x\r')
    assert list(formats.read_table(path, LABELLED)) == [Row(text="one\ntwo", label="x")]


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", ","), ("a.tsv", ";")]
)
def test_the_separator_is_the_one_that_gives_the_header_its_columns(tmp_path, name, separator):
    path = written(tmp_path, name, f'\ufeff\n"text"{separator}label{separator}\n"a{separator}, b"{separator}x\n')
    assert list(formats.read_table(path, LABELLED)) == [Row(text=f"a{separator}, b", label="x")]


@pytest.mark.parametrize(
    "table",
    [
        "label,text,,,\nx,a,,,\ny,b,,,\n",
        "label,text,,\nx,a\ny,b,,,,\n",  # fewer and more blank cells
        "label, text,id,id\n x ,a,1,2\n,,,\ny,b,,\n",
        ",label,Unnamed: 0,text\n0,x,0,a\n1,y,1,b\n",
    ],
)
def test_only_the_chosen_columns_need_names(tmp_path, table):
    rows = list(formats.read_table(written(tmp_path, "a.csv", table), LABELLED))
    assert rows == [Row(text="a", label="x"), Row(text="b", label="y")]


@pytest.mark.parametrize(
    ("name", "label"),
    [(kind, label) for label in ("nan", "NaN", "None", "<NA>", "NULL", "", " ") for kind in ("a.csv", "a.jsonl")]
    + [("a.jsonl", float("nan")), ("a.jsonl", None), ("a.jsonl", [])],
)
def test_a_missing_label_is_refused_by_file_and_row_or_allowed(tmp_path, name, label):
    is_json = name == "a.jsonl"
    row = json.dumps({"text": "b", "label": label}) if is_json else f"b,{label}"
    path = written(tmp_path, name, f'{{"text": "a", "label": "x"}}\n{row}\n' if is_json else f"text,label\n{row}\n")
    read = formats.read_json_lines if is_json else formats.read_table
    require_facts(refused(lambda: list(read(path, LABELLED))), f"{path}:2: no label ... 'label'")
    assert list(read(path, replace(LABELLED, require_label=False)))[-1] == Row(text="b")


def test_snlis_texts_without_a_majority_have_no_label(tmp_path):
    """Such a text has five labels, for which the header has one name, and the last cell is gold_label."""
    lines = ["sentence1 sentence2 label1 gold_label", "a b x x x y y -", "c d x x", "e f x x y y y y"]
    path = written(tmp_path, "train.tsv", "\n".join(lines).replace(" ", "\t") + "\n")
    rows = [(row.text, row.pair, row.label) for row in formats.read_table(path, GLUE, quoted=False)]
    assert rows == [("a", "b", None), ("c", "d", "x"), ("e", "f", "y")]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n\n{"text": "b"}',
            "--columns: no LABEL column 'label' in {}:3",
        ),
        ("a.jsonl", '{"text": "a", "label": 1}\n{', "{}:2: not valid JSON"),
        ("a.jsonl", "[" * 100_000, "{}:1: "),
        ("a.jsonl", '{"text": "a", "label": null}', "{}:1: no label ... 'label'"),
        ("a.jsonl", '{"text": "a \\ud83d", "label": 1}', "{}:1: half a character ... '\\ud83d' ... 'text'"),
        ("a.jsonl", "[1]\n", "{}:1: not a JSON object"),
        ("a.jsonl", '{"text": 1, "label": 1}', "{}:1: no text ... 'text'"),
        ("a.csv", "text,label,text\na,b,c\n", "{}: two columns ... 'text'"),
        ("a.csv", "text,class\na,b\n", "--columns: no LABEL column 'label' in {} ... 'text', 'class'"),
        ("a.csv", "text,label\na,b\nc\n", "{}:3: 1 cells ... 2"),
        ("a.csv", 'text,label\n"a,b\n', "{}:2: unexpected end of data"),
        ("a.csv", b"text,label\na,b\ncaf\xe9,b\n", "{}:3: ... UTF-8 ... 0xe9 ... iconv"),
        ("a.csv", b"text,label\r" + b"a,b\r" * 9000 + b"caf\xe9,b\r", "{}:9002: ... UTF-8 ... 0xe9 ... iconv"),
        ("a.csv", "text,label\na,b\nc,d\n".encode("utf-16")[:-1], "{}:3: not valid UTF-16 ... UTF-8"),
        ("a.csv", "text,label\na,b\n".encode("utf-16-le"), "{}: UTF-16 or UTF-32 without a byte-order mark ... iconv"),
        ("a.csv", "text,label,\na,b,,c\n", "{}:2: 4 cells ... 3"),
        ("a.csv", "text,label\na,b\ntext,label\nc,d\n", "{}:3: the header again"),
        ("a.tsv", 'text\tlabel\n"a\tx\nb\ty\nc"\tz\n', "{}:4: a quotation mark ... no partner"),
        ("a.csv", b"PK\3\4\0\0", "{}: a zip or Excel file, not text"),
        ("a.jsonl", b"\x1f\x8b\x08\0", "{}: a gzip file, not text"),
        ("a.jsonl", '{"text": "a", "label": [2, 5]}', "{}:1: column 'label' has several labels"),
        ("a.jsonl", '{"text": ["a", "b"], "label": 1}', "{}:1: column 'text' has a list, not a text"),
    ],
)
def test_what_is_no_row_is_named_by_file_and_line(tmp_path, name, content, named):
    path = written(tmp_path, name, content)
    reader = formats.read_json_lines if name.endswith("jsonl") else formats.read_table
    require_facts(refused(lambda: list(reader(path, LABELLED))), named.format(path))


def test_a_label_is_the_same_however_its_accent_is_written(tmp_path):
    path = written(tmp_path, "a.csv", "text,label\na,caf\u00e9\nb,cafe\u0301\n")
    assert len({row.label for row in formats.read_table(path, LABELLED)}) == 1


def test_a_text_without_blank_lines_is_many_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_LONGEST", 8)
    path = written(tmp_path, "a.txt", "one two\nthree four\n\nfive\n")
    assert [row.text for row in formats.read_documents(path)] == ["one two three fo", "ur", "five"]


@pytest.mark.parametrize("header", ["gj04\t1\t\tOur friends", "question1\tquestion2\tid"])
def test_an_unknown_header_of_glue_asks_for_the_columns(tmp_path, header):
    path = written(tmp_path, "train.tsv", f"{header}\n")
    assert "--columns TEXT,LABEL" in refused(lambda: list(formats.read_table(path, GLUE, quoted=False)))


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
    with path.open("a") as file:
        file.write('"\tx?\n')  # as in QQP
    *_, broken = formats.read_table(path, GLUE, quoted=False)
    assert broken.label is None
    *unlabelled, _ = formats.read_table(path, GLUE, quoted=False, labelled=False)
    assert unlabelled == [Row(text="one", pair="two")]


def test_a_score_is_no_label(tmp_path):
    path = written(tmp_path, "train.tsv", "index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.8\n")
    assert "STS-B" in refused(lambda: list(formats.read_table(path, GLUE, quoted=False)))
    assert next(formats.read_table(path, GLUE, quoted=False, labelled=False)).pair == "b"
