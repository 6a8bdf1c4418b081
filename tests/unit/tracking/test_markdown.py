from pathlib import Path

from hvdtrain.tracking import markdown


def test_a_document_is_a_table_of_its_values_and_one_for_each_list_of_rows():
    rows = [{"rank": 0, "host": "a"}, {"rank": 1, "gpu": "x|y\nz"}]
    document = {"none": None, "flag": True, "where": Path("a/b"), "sizes": {"batch": 64}, "list": [1, 2], "ranks": rows}
    values, *others = markdown.tables(document).split("\n\n")
    assert values.splitlines()[:3] == ["| name | value |", "| --- | --- |", "| none | - |"]
    assert values.splitlines()[3:] == ["| flag | yes |", "| where | a/b |", "| sizes.batch | 64 |", "| list | 1 2 |"]
    assert others == [
        "**ranks**",
        "| rank | host | gpu |\n| --- | --- | --- |\n| 0 | a | - |\n| 1 | - | x\\|y z |",
    ]
