from dataclasses import replace

import pytest

from hvdtrain.tasks.text.corpus import make_corpus
from hvdtrain.tasks.text.formats import Row
from hvdtrain.tasks.text.settings import tiny
from tests.refusals import refused, require_facts


def corpus(folder, data, **options):
    return make_corpus(replace(tiny(), data=data, data_dir=folder, **options))


def texts(rows):
    return [row.text for row in rows]


def put(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def test_train_and_test_have_files_of_their_own_or_each_fifth_row_is_for_the_test(tmp_path):
    put(tmp_path, train_csv="text,label\na,1\nb,2\n", dev_csv="text,label\nc,1\n", README_md="text")
    found = corpus(tmp_path, "csv")
    assert (texts(found.train()), texts(found.test()), texts(found.train())) == (["a", "b"], ["c"], ["a", "b"])
    put(tmp_path, b_txt="\n\n".join("efgh"), a_txt="\n\n".join("abcd"))
    found = corpus(tmp_path, "text", task="mlm")
    assert (texts(found.train()), texts(found.test())) == (list("abcdfgh"), ["e"])


def test_of_labels_that_come_in_turn_each_is_in_both_splits_and_a_rare_one_is_trained(tmp_path):
    rows = "".join(f"text {number},{number % 5}\n" for number in range(50))
    put(tmp_path, data_csv=f"text,label\n{rows}rare,x\n")
    found = corpus(tmp_path, "csv")
    of_train, of_test = (sorted(row.label for row in split()) for split in (found.train, found.test))
    assert of_train == [*sorted("01234" * 8), "x"]
    assert of_test == sorted("01234" * 2)


@pytest.mark.parametrize(
    ("names", "usage"),
    [
        (
            "TRAIN.CSV Valid.Csv Test.TSV",
            "'TRAIN.CSV', test is 'Test.TSV' ... 1 of another split (Valid)",
        ),
        ("d/d/Corona_train.csv d/d/Corona_test.csv d/.x", "'d/d/Corona_train.csv' ... 1 hidden or of the system"),
        (
            "train.csv test.csv submission.csv",
            "test is 'test.csv' ... not used: 1 of no split (submission)",
        ),
        (
            "train.csv ._train.csv a.md b/c.csv",
            "row of a label; files used: 1, not used: 1 hidden or of the system, 1 with the ending .md, 1 in b/",
        ),
        (
            "train/a.csv train/b.csv test/a.csv pred/a.csv",
            "'train/a.csv', 'train/b.csv', test is 'test/a.csv' ... 1 of no",
        ),
        ("train.csv dev.csv 1.csv 2.csv 3.csv 4.csv 5.csv 6.csv 7.csv 8.csv 9.csv x.csv", "1 of no split (8), 2 more"),
    ],
)
def test_files_of_splits_are_found_by_names_as_people_write_them_and_all_are_counted(tmp_path, names, usage):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text,label\na,1\n")
    require_facts(corpus(tmp_path, "csv").usage, f"--data-dir {tmp_path}: ... {usage}")


def test_mrpc_has_the_files_that_glues_scripts_make_of_its_own(tmp_path):
    for name in ("train.tsv", "dev.tsv", "test.tsv", "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"):
        (tmp_path / name).write_text(f"sentence\tlabel\n{name}\t1\n")
    found = corpus(tmp_path, "glue")
    assert (texts(found.train()), texts(found.test())) == (["train.tsv"], ["dev.tsv"])


def test_mnli_is_tested_by_its_matched_part(tmp_path):
    row = "sentence1\tsentence2\tgold_label\n{}\tb\tneutral\n"
    put(tmp_path, train_tsv=row.format("a"))
    for name in ("dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
        (tmp_path / f"{name}.tsv").write_text(row.format(name))
    assert texts(corpus(tmp_path, "glue").test()) == ["dev_matched"]


def test_masked_words_of_glue_need_no_labels(tmp_path):
    put(tmp_path, train_tsv="question\tsentence\na\tb\n", dev_tsv="question\tsentence\nc\td\n")
    [row] = corpus(tmp_path, "glue", task="mlm").train()
    assert (row.text, row.pair, row.label) == ("a", "b", None)
    assert "not one of GLUE's" in refused(lambda: list(corpus(tmp_path, "glue").train()))


def test_the_key_follows_contents_and_columns_and_not_names_of_folders(tmp_path):
    keys = []
    for folder, text, options in (
        ("a", "text,label,other\na,1,2\n", {}),
        ("b", "text,label,other\na,1,2\n", {}),
        ("c", "text,label,other\nb,1,2\n", {}),
        ("d", "text,label,other\na,1,2\n", {"columns": "text,other"}),
        ("e", "text,label,other\na,1,2\n", {"task": "mlm"}),
    ):
        (tmp_path / folder).mkdir()
        put(tmp_path / folder, all_csv=text)
        keys.append(corpus(tmp_path / folder, "csv", **options).key())
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (None, Row(text="1", label="4")),
        ('"a, b"', Row(text="2", label="4")),
        ("text, class", Row(text="1", label="3")),
        ('text,"a, b",class', Row(text="1", pair="2", label="3")),
    ],
)
def test_columns_are_named_in_one_word(tmp_path, columns, row):
    put(tmp_path, all_csv='text,"a, b",class,label\n' + 6 * "1,2,3,4\n")
    assert next(corpus(tmp_path, "csv", columns=columns).train()) == row


def test_columns_of_glue_may_be_named(tmp_path):
    put(tmp_path, train_tsv="s1\ts2\tlabel\na\tb\tx\n", dev_tsv="s1\ts2\tlabel\nc\td\ty\n")
    [row] = corpus(tmp_path, "glue", columns="s1,s2,label").train()
    assert row == Row(text="a", pair="b", label="x")
    put(tmp_path, train_tsv="s1\ts2\tscore\na\tb\t1.5\n")
    rows = corpus(tmp_path, "glue", columns="s1,s2,label").train()
    facts = f"--columns: no LABEL column 'label' in {tmp_path / 'train.tsv'} ... 's1', 's2', 'score'"
    require_facts(refused(lambda: list(rows)), facts)


@pytest.mark.parametrize("unlabelled", ["text,label\nt,-1\nt,-1.0\n", "text,label\nt,\nt,nan\n", "text\nt\n"])
def test_a_published_test_without_labels_gives_way_to_the_validation(tmp_path, unlabelled):
    put(tmp_path, train_csv="text,label\na,0\nb,1\n", test_csv=unlabelled, validation_csv="text,label\nv,1\n")
    found = corpus(tmp_path, "csv")
    assert texts(found.test()) == ["v"]
    require_facts("\n".join(found.remarks), "test.csv ... -1 ... validation.csv is the test")
    assert texts(corpus(tmp_path, "csv", task="mlm").test())[0] == "t"  # which needs no labels
    put(tmp_path, validation_csv=unlabelled)
    line = refused(lambda: corpus(tmp_path, "csv"))
    require_facts(line, f"{tmp_path / 'test.csv'}, {tmp_path / 'validation.csv'}: no labels ... -1 ... remove")


def test_a_test_with_some_labels_is_taken(tmp_path):
    rows = "text,label\na,-1\nb,1\n"
    put(tmp_path, train_csv=rows, test_csv=rows, dev_csv="text,label\nv,1\n")
    found = corpus(tmp_path, "csv")
    assert (texts(found.test()), found.remarks) == (["a", "b"], ())


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "--data csv (.csv, .tsv)"),
        ({"train_csv": "", "test_csv": "text,label\n"}, "train.csv: empty"),
        ({"train_csv": "a", "more_csv": "a"}, "either 'train' is all of the data ... or 'more' belongs to the data"),
        ({"train_csv": "text,label\n", "train_tsv": "text\n"}, "train.tsv: train.csv has the same name"),
    ],
)
def test_a_folder_without_texts_is_refused(tmp_path, files, named):
    put(tmp_path, **files)
    require_facts(refused(lambda: corpus(tmp_path, "csv")), named)
    assert "no such folder" in refused(lambda: corpus(tmp_path / "none", "csv"))
