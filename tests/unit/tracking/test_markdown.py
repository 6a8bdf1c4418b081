from pathlib import Path

from hvdtrain.tracking import markdown


def test_names_and_values_with_nested_ones_by_their_path():
    document = {"lr": 0.1, "none": None, "flag": True, "where": Path("a/b"), "derived": {"batch": 64}, "list": [1, 2]}
    assert markdown.tables(document).splitlines() == [
        "| name | value |",
        "| --- | --- |",
        "| lr | 0.1 |",
        "| none | - |",
        "| flag | yes |",
        "| where | a/b |",
        "| derived.batch | 64 |",
        "| list | 1 2 |",
    ]


def test_rows_are_a_table_of_their_own():
    document = {"ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "gpu": "x|y\nz"}], "plan": None}
    assert markdown.tables(document).split("\n\n") == [
        "| name | value |\n| --- | --- |\n| plan | - |",
        "**ranks**",
        "| rank | host | gpu |\n| --- | --- | --- |\n| 0 | a | - |\n| 1 | - | x\\|y z |",
    ]
