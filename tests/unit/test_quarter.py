"""The quarter of an hour on a GPU: a step's limit and leftovers, its row, and where the figures go."""

import json
import sys
import tarfile

import pytest

from bench import gpu_results
from bench.quarter import driver
from bench.quarter.driver import Quarter, Step
from tests.unit.run.supervise.test_process import has_ended

LEAVES_ONE = """
import subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(left.pid, flush=True)
"""


def step(name, program="pass", **how):
    return Step(**{"name": name, "claim": "?", "limit_s": 20.0, "command": (sys.executable, "-c", program), **how})


@pytest.fixture
def quarter(tmp_path):
    """Run steps side by side; return their rows as they are on disk."""

    def run(*lanes, **how):
        taken = Quarter(work=tmp_path / "work", output=tmp_path / "output", minutes=1.0, **how)
        taken.run(lanes)
        return {row["step"]: row for row in map(json.loads, (tmp_path / "output/steps.jsonl").read_text().splitlines())}

    return run


@pytest.mark.parametrize(("rest", "state"), [("pass", "OK"), ("time.sleep(60)", "LIMIT")])
def test_a_step_leaves_no_process(quarter, monkeypatch, tmp_path, rest, state):
    monkeypatch.setattr(driver, "TOO_LITTLE_S", 0.0)
    limit_s = 20.0 if state == "OK" else 1.0
    assert quarter([step("leaves", LEAVES_ONE + rest, limit_s=limit_s)])["leaves"]["state"] == state
    pid = (tmp_path / "work/steps/leaves/log").read_text().split()[-1]
    assert has_ended(int(pid))


def test_each_end_of_a_step_has_its_row(quarter, monkeypatch, tmp_path):
    def wrong(folder, output):
        assert "why" not in output, output

    lanes = (
        [step("good", "print('7')", check=lambda _, text: {"answer": int(text.split()[-1])}), step("after")],
        [step("failed", "raise SystemExit(3)"), step("wrong", "print('why')", check=wrong)],
        [step("no-file", check=lambda folder, _: (folder / "none").read_text()), step("gpu", needs_gpu="no GPU")],
    )
    rows = quarter(*lanes, on_cpus=True)
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "good": "OK",
        "after": "OK",
        "failed": "FAILED",
        "wrong": "WRONG",
        "no-file": "WRONG",
        "gpu": "NO GPU",
    }
    assert rows["good"]["figures"] == {"answer": 7}
    assert "exit status 3" in rows["failed"]["figures"]
    assert (tmp_path / "output/report.md").read_text().count("\n") == 2 + len(states)
    monkeypatch.setattr(driver, "RESERVE_S", 60.0)
    assert quarter([step("late")])["late"]["state"] == "NO TIME"


PAGE = """GPU: none yet.

| feature | CPU | GPU | TCP |
|---|---|---|---|
| `check` | run | sim | sim |
| `--stages` | run | - | - |
"""


@pytest.fixture
def output(tmp_path):
    """What a quarter has brought back: `two-bucket` with losses like its reference's, but judged wrong on the day."""
    rows = [
        {"step": "launcher", "state": "OK", "claim": "?", "s": 2.5, "figures": ["+ hvdlaunch check"]},
        {"step": "two-bucket", "state": "WRONG", "claim": "?", "s": 1.0, "figures": "AssertionError: {}"},
        {"step": "clock", "state": "NO TIME", "claim": "?", "s": 0.0, "figures": ""},
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "logs.txt").write_text("\n##### launcher: OK, 2.5 s\n+ x\n\n##### two-bucket: WRONG, 1.0 s\n+ y\n")
    with tarfile.open(tmp_path / "runs.tar.gz", "w:gz") as runs:
        for name, loss in (("two-bucket", 2.0000001), ("two-cpu-bucket", 2.0)):
            file = tmp_path / "metrics.jsonl"
            file.write_text(json.dumps({"train/loss": loss}) + "\n")
            runs.add(file, f"{name}/runs/effnet/bucket/metrics.jsonl")
    return tmp_path


def test_results_are_judged_by_todays_checks(output):
    rows = gpu_results.collect([output])
    assert {name: row["state"] for name, row in rows.items()} == {"launcher": "OK", "two-bucket": "OK"}
    assert rows["two-bucket"]["figures"]["first five differ by"] == pytest.approx(5e-8)


def test_the_gpu_column_names_only_what_has_run(output, monkeypatch):
    monkeypatch.setattr(gpu_results, "ROWS", {"`check`": ("launcher",), "`--stages`": ("two-stages",)})
    page = gpu_results.tested(PAGE, gpu_results.collect([output]), "GPU: one card.\n")
    assert page.startswith("GPU: one card.\n\n|")
    assert "| `check` | run | run | sim |" in page
    assert "| `--stages` | run | - | - |" in page


def test_rows_and_parts_of_figures_stand_in_the_cell():
    figures = {"rows": [{"step": "a", "ms": 3.0}], "kernels": {"copy": 2}, "memory": {"mib": 5}}
    assert gpu_results.short(figures) == "a 3, kernels copy 2, mib 5"
