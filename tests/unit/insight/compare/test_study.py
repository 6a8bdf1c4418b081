import csv
import json

import pytest

from hvdtrain.insight.compare import study, study_table
from hvdtrain.insight.compare.metrics import ACCURACY
from hvdtrain.settings.safety.exits import BadInput

from .runfolders import make_run, make_study, table_rows, three_sizes

pytestmark = pytest.mark.usefixtures("without_pictures")


def read(file):
    return study.read_study(file, [])


def rows_of(file):
    """The table that a terminal shows of a study."""
    text, _ = study_table.compare(file)
    return table_rows(text)


def test_table_and_picture_of_a_study_lie_beside_it(tmp_path):
    file = three_sizes(tmp_path, target=80, price_per_gpu_hour=3600)
    one, two, _ = rows_of(file)
    assert two == {
        "ranks": "2",
        "hosts": "1",
        "n": "2",
        "time s": "4.20 ± 0.00",
        "speed-up": "1.80",
        "efficiency": "90.0 %",
        "images/s": "1800 ± 0",
        "accuracy %": "96.85 ± 0.07",
        "steps": "48",
        "s to 80 %": "2.40 ± 0.00",
        "rank-hours": "0.00233",
        "cost": "8.4",
    }
    assert "remark" not in one
    folder = file.parent
    assert {*folder.iterdir()} == {file, *map(folder.joinpath, ("table.md", "table.csv", "scaling.png"))}
    text = (folder / "table.md").read_text()
    assert table_rows(text)[1] == two
    assert "- accuracy of 4 ranks against 1 rank: -2.00 points: outside" in text
    rows = csv.DictReader((folder / "table.csv").read_text().splitlines())
    assert [float(row["speed_up"]) for row in rows] == pytest.approx([1, 1.8, 2.4])


def test_time_to_the_target_is_that_of_the_first_evaluation_that_reached_it(tmp_path):
    run = make_run(tmp_path / "runs/a", np=1, accuracy=0.97)
    seen = [(1, "eval", 0.7), (2, "train", 0.99), (3.5, "eval", 0.9), (4, "eval", 0.8)]
    lines = [json.dumps({"epoch": 1, "seconds": at_s, f"{part}/accuracy": value}) for at_s, part, value in seen]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    found = read(make_study(tmp_path / "s", [(1, 0, run, None)], target_accuracy=90))
    assert found.sizes[0].time_to_s(found.best, found.target).mean == 3.5  # of a study of an older version
    _, two, _ = read(three_sizes(tmp_path)).sizes
    assert two.time_to_s(ACCURACY, 0.968).n == 2
    assert two.time_to_s(ACCURACY, 0.9685) is None  # it is reached by one of two


@pytest.mark.parametrize(("higher", "target", "at_s"), [(True, 0.86, 3), (False, 0.88, 1)])
def test_the_target_is_of_the_best_metric_in_its_own_direction(tmp_path, higher, target, at_s):
    run = make_run(tmp_path / "runs/a", np=1, metric="iou", accuracy=0.97, result={"higher_is_better": higher})
    time_s = json.loads((run / "result.json").read_text())["wall_time_s"] - 1
    [row] = rows_of(make_study(tmp_path / "s", [(1, 0, run, None)], target=target))
    assert float(row[f"s to iou {target}"]) == pytest.approx(time_s * at_s / 4, abs=0.01)


def test_a_failed_size_is_a_row_that_says_why(tmp_path):
    replaced = make_run(tmp_path / "runs/c", np=16)
    runs = [
        (1, 0, make_run(tmp_path / "runs/a  b", np=1), None),
        (1, 1, None, "rank 0 on\x1b one died of signal 9"),
        (2, 0, make_run(tmp_path / "runs/b", np=2, result={"exit_reason": "interrupted"}), None),
        (4, 0, None, "no GPU"),
        (4, 1, None, "no GPU"),
        (8, 0, tmp_path / "runs/gone", None),
        (16, 0, None, None),
        (32, 0, replaced, None),
    ]
    table = rows_of(make_study(tmp_path / "s", runs, sizes=[1, 64]))
    assert {row["ranks"]: row["remark"] for row in table} == {
        "1": "1 of 2 runs: rank 0 on\\x1b one died of signal 9",
        "2": "it ended before it was finished: interrupted",
        "4": "no GPU",
        "8": f"no result.json that can be read in {tmp_path}/runs/gone",
        "16": "it named no run folder",
        "32": f"{replaced} holds a run of 16 ranks: another run has replaced this one",
        "64": "not run yet",
    }
    assert [row["accuracy %"] for row in table] == ["97.00", *["-"] * 6]


def test_runs_of_one_size_with_other_settings_are_not_averaged(tmp_path):
    one, other = make_run(tmp_path / "a", np=1), make_run(tmp_path / "b", np=1, seed=1, config={"lr": 0.5})
    found = read(make_study(tmp_path / "s", [(1, 0, one, None), (1, 1, other, None)]))
    assert (found.sizes[0].runs, found.sizes[0].remark()) == ((), "not averaged, for they differ in lr")
    assert study.advice(found) == ["No size has a result yet: nothing can be advised."]


@pytest.mark.parametrize(
    ("mode", "batches", "line"),
    [
        ("weak", (64, 128), None),
        ("strong", (64, 64), None),
        ("weak", (64, 100), "Not weak scaling: 1 rank had 64, 2 ranks had 50 images per rank and step."),
        ("strong", (64, 128), "Not strong scaling: 1 rank had 64, 2 ranks had 128 images per step."),
    ],
)
def test_the_size_that_breaks_the_mode_is_named(tmp_path, mode, batches, line):
    made = [
        (np, 0, make_run(tmp_path / f"np{np}", np=np, result={"global_batch": batch}), None)
        for np, batch in enumerate(batches, start=1)
    ]
    assert study.remarks(read(make_study(tmp_path / "s", made, mode=mode))) == ([line] if line else [])


def test_a_study_whose_sizes_differ_in_more_than_ranks_says_so(tmp_path):
    one, two = make_run(tmp_path / "a", np=1), make_run(tmp_path / "b", np=2, environment={"torch": "3"})
    found = read(make_study(tmp_path / "s", [(1, 0, one, None), (2, 0, two, None)]))
    assert study.remarks(found) == ["The sizes differ in more than their ranks: torch (2.11.0, 3)."]


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({"min_efficiency": 95}, 1),
        ({"min_efficiency": 90}, 2),
        ({"max_accuracy_loss": 0.5}, 2),
        ({"max_accuracy_loss": 5}, 4),
        ({"max_accuracy_loss": 5, "min_efficiency": 80}, 2),
    ],
)
def test_the_largest_size_inside_the_limits_is_advised(tmp_path, limits, ranks):
    found = read(three_sizes(tmp_path, **limits))
    assert study.advised_size(found).np == ranks
    assert study.advice(found)[0].startswith(f"Advice: {ranks} rank")


def test_the_smallest_size_is_its_own_measure(tmp_path):
    found = read(three_sizes(tmp_path, min_efficiency=100.001))  # its own 100 % may be rounded down
    assert study.advised_size(found).np == 1


def test_advice_says_what_is_wrong_with_larger_sizes(tmp_path):
    lines = study.advice(read(three_sizes(tmp_path, min_efficiency=80, max_accuracy_loss=0.1)))
    limits = "an efficiency of at least 80 % and an accuracy loss of at most 0.1 points"
    assert lines[:3] == [
        f"Advice: 1 rank, the largest size with {limits} (100.0 %).",
        "2 ranks: its accuracy is 0.20 points lower, the limit is 0.1, though inside the spread over seeds.",
        "4 ranks: efficiency 60.0 % is below 80 %, its accuracy is 2.00 points lower, the limit is 0.1.",
    ]


@pytest.mark.parametrize(
    "change", [{"sizes": [0]}, {"price_per_gpu_hour": 10**400}, {"mode": None}, {"runs": [{"np": 1, "run_folder": 5}]}]
)
def test_an_odd_study_is_one_line(tmp_path, change):
    file = make_study(tmp_path / "s", [], **change)
    with pytest.raises(BadInput, match=r"not the sweep.json of a study .* Run hvdlaunch sweep again"):
        read(file)


def test_texts_are_told_in_samples_and_their_own_metrics_and_gpus_in_gpu_hours(tmp_path):
    def row(np, speed):
        of_text = {"train_images_per_s": None, "train_samples_per_s": speed, "eval_f1": 0.8124, "wall_time_s": 3600}
        return np, 0, make_run(tmp_path / str(np), np=np, device="cuda:0", result=of_text), None

    one, two, three = rows_of(make_study(tmp_path / "study", [row(1, 100.0), row(2, 180.0), row(3, 0)]))
    assert (one["samples/s"], two["samples/s"], two["speed-up"]) == ("100", "180", "1.80")
    assert (two["F1"], two["GPU-hours"], three["samples/s"]) == ("0.812", "2", "-")
    assert "images/s" not in one
