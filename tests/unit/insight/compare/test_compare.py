import csv
import os

import pytest

from hvdtrain.insight.compare import command as compare
from hvdtrain.settings.safety.exits import BadInput

from .runfolders import make_run, table_rows, two_recipes

pytestmark = pytest.mark.usefixtures("without_pictures")


def compared(folder):
    """The table with all columns, and what stands below it."""
    compare.main([str(folder), "--out", str(folder / "out")])
    return (folder / "out" / "table.md").read_text()


def test_runs_that_differ_in_the_seed_are_one_row(tmp_path):
    first, second = table_rows(compared(two_recipes(tmp_path)))
    assert (first["run"], first["n"], first["seeds"], first["lr"]) == ("a-seed0 and 2 more", "3", "0, 1, 2", "not set")
    assert (first["accuracy %"], second["accuracy %"]) == ("96.00 ± 0.20", "98.00 ± 0.20")
    assert (first["steps"], first["skipped steps"], first["exit reason"]) == ("48", "0", "finished")
    assert first["peak MiB"] == "612 ± 0"
    assert list(first)[3] == "lr"  # what differs comes before what came out
    assert not {"model", "np", "commit"} & set(first)
    first, second = csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines())  # plain numbers
    assert float(first["accuracy_percent"]) == pytest.approx(96)
    assert float(first["accuracy_percent_deviation"]) == pytest.approx(0.2)
    assert (second["lr"], second["n"], second["steps"]) == ("0.5", "3", "48.0")


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (0.02, "outside the spread over seeds (95 % interval +1.55 to +2.45 points)"),
        (0.001, "inside the spread over seeds (95 % interval -0.35 to +0.55 points)"),
    ],
)
def test_a_difference_is_compared_with_the_spread(tmp_path, capsys, apart, words):
    text = compared(two_recipes(tmp_path, apart=apart))
    line = f"- accuracy of b-seed0 and 2 more against a-seed0 and 2 more: +{100 * apart:.2f} points: {words}\n"
    shown = capsys.readouterr().out
    for each in (text, shown):
        assert line in each
        assert "Welch" in each
    assert shown.endswith(f"All columns: {tmp_path}/out\n")


def test_the_best_metric_of_a_task_is_compared_as_accuracy_is(tmp_path, capsys):
    text = compared(two_recipes(tmp_path, metric="iou", result={"eval_pixels_right": 0.00012}))
    first, second = table_rows(text)
    assert (first["iou"], second["iou"]) == ("0.960 ± 0.002", "0.980 ± 0.002")
    assert first["pixels_right"] == "0.000120 ± 0.000000"
    assert "accuracy" not in text
    assert "- iou of b-seed0 and 2 more against a-seed0 and 2 more: +0.0200: outside the spread over seeds" in text
    assert "iou" in table_rows(capsys.readouterr().out)[0]


def test_a_task_that_selects_by_loss_is_compared_by_loss_and_nothing_is_claimed_of_single_runs(tmp_path):
    make_run(tmp_path / "a", metric="loss", result={"eval_loss": 0.5})
    make_run(tmp_path / "b", metric="loss", result={"eval_loss": 0.25}, config={"width": 8})
    text = compared(tmp_path)
    assert [(row["loss"], row["width"]) for row in table_rows(text)] == [("0.5000", "-"), ("0.2500", "8")]
    assert "- loss of" not in text
    assert "With n = 1 the spread over seeds is not known" in text


def test_a_terminal_gets_the_first_settings_that_differ_and_the_results_that_tell_something(tmp_path, capsys):
    for place in (0, 1):
        known = {f"option_{number}": f"/data/{'long-' * 9}{place}" for number in range(9)}
        make_run(tmp_path / f"run{place}", np=1 + place, accuracy=0.9 + place / 20, config=known)
    assert len(table_rows(compared(tmp_path))[0]) == 24
    first, _ = table_rows(capsys.readouterr().out)
    assert list(first) == ["run", "np", "option_0", "option_1", "option_2", "time s", "images/s", "accuracy %", "loss"]
    assert first["option_0"] == "…g-long-long-long-long-0"  # the end of a path differs


def test_what_moves_the_cursor_or_ends_a_cell_is_escaped(tmp_path, capsys):
    make_run(tmp_path / os.fsdecode(b"a\xff\x1b[2J"), config={"data\x1b": ["b\ud800"], "data_dir": "x|y"})
    (make_run(tmp_path / "c\x1b") / "result.json").unlink()
    compared(tmp_path)
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "a\\udcff\\x1b[2J" in output.out
    assert '["b\\\\ud800"]' in output.out
    assert "| x\\|y" in output.out


@pytest.mark.parametrize(
    ("change", "name", "values"),
    [
        ({"config": {"lr": 0.5}}, "lr", ["not set", "0.5"]),
        ({"environment": {"commit": "def5678"}}, "commit", ["abc1234", "def5678"]),
        ({"environment": {"nccl_settings": {"NCCL_ALGO": "Ring"}}}, "NCCL_ALGO", ["-", "Ring"]),
        ({"hosts": ["one", "two"]}, "hosts", ["1", "2"]),
        ({"device": "cuda:0"}, "device", ["cpu", "cuda:0"]),
        ({"threads": 2}, "threads", ["1", "2"]),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path, change, name, values):
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1, **change)
    assert [row[name] for row in table_rows(compared(tmp_path))] == values


def test_other_data_is_not_compared_and_other_hosts_and_resumed_runs_are_named(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", seed=seed, accuracy=0.9 + seed / 100, speed=1000 + seed)
        changes = {"config": {"data": "cifar10"}, "hosts": ["two"], "result": {"resumed": seed}}
        make_run(tmp_path / f"b{seed}", seed=seed, accuracy=0.5 + seed / 100, speed=900 + seed, **changes)
    text = compared(tmp_path)
    assert "- accuracy of b0 and 1 more against a0 and 1 more: not compared, since data differ\n" in text
    assert "- time of b0 and 1 more against a0 and 1 more (on two and on one): +0.639 s: outside" in text
    assert "b0 and 1 more: 1 resumed: times leave out what was lost before." in capsys.readouterr().err


def test_runs_that_did_not_finish_stay_alone_and_are_compared_with_nothing(tmp_path):
    make_run(tmp_path / "a", seed=0)
    for seed in (1, 2):
        make_run(tmp_path / f"b{seed}", seed=seed, result={"exit_reason": "interrupted"})
        (make_run(tmp_path / f"c{seed}", seed=seed) / "result.json").unlink()
    text = compared(tmp_path)
    assert [row["run"] for row in table_rows(text)] == ["a", "b1", "b2", "c1", "c2"]
    assert "against" not in text


def test_what_is_missing_is_a_dash_and_a_line_and_the_rest_is_shown(tmp_path, capsys):
    make_run(tmp_path / "a", result={"eval_loss": None, "skipped_steps": None, "memory": None})
    (make_run(tmp_path / "b", seed=1) / "result.json").unlink()
    (make_run(tmp_path / "c", seed=2) / "config.json").write_text("{")
    (make_run(tmp_path / "d", seed=3) / "config.json").unlink()
    a, b, d = table_rows(compared(tmp_path))
    assert (a["accuracy %"], a["loss"], a["skipped steps"], a["peak MiB"]) == ("97.00", "-", "-", "-")
    assert (b["accuracy %"], b["time s"], b["exit reason"]) == ("-", "-", "-")
    assert d["accuracy %"] == "97.00"
    lines = capsys.readouterr().err.splitlines()
    starts = ("b: no result.json", "c: cannot be read (config.json: ", "d: no config.json")
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"hvdtrain: warning: {tmp_path}/{start}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "nothing to compare"),
        (["--sweep", "gone.json"], "gone.json: cannot be read"),
        (["a", "--sweep", "b"], "not both"),
        (["--sweep", "b", "--out", "c"], "--out: only for run folders"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option. See --help"),
        (["gone"], "gone: not a folder"),
        (["empty"], "empty: no run"),
        (["odd"], r"no run can be compared: odd: cannot be read \(result.json: "),
        (["a", "--out", "odd/result.json/out"], "another --out"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "a")
    (make_run(tmp_path / "odd") / "result.json").write_text("{")
    with pytest.raises(BadInput, match=line):
        compare.main(words)
