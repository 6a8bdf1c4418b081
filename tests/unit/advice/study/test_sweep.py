import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from launch.advice.study import sweep
from launch.advice.study.sweep import Study
from launch.cli import main as cli
from launch.errors import CommandError, HostError, LaunchError, PlacementError, ProcessError
from launch.process import Answer
from launch.run.start.request import RunRequest
from launch.run.supervise.run import RunResult
from tests.unit.machines import hosts, refusal_of, request

REQUEST = request(np=1, program=("python", "-m", "some.training"), as_root=True)
LIMITS = {"price_per_gpu_hour": 2.5, "target": 95.0, "min_efficiency": 80.0, "max_accuracy_loss": 1.0}
STUDY = Study(request=REQUEST, sizes=(4, 1, 2), seeds=2, mode="weak", name="mine", **dict.fromkeys(LIMITS))
FILE = Path("sweeps/mine/sweep.json")
ALL = [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1)]


class Machine:
    """What sweep reaches the world through: each run leaves a finished result, unless `instead` does something else."""

    def __init__(self) -> None:
        self.instead: dict[tuple[int, int], Callable[[Path], Any]] = {}
        self.ran: list[tuple[int, int]] = []
        self.environments: list[dict[str, str]] = []
        self.keepers: set[str] = set()
        self.done: list[str] = []  # the runs and drawings, in order
        self.drawn: Answer | ProcessError = Answer(status=0, out="| ranks |\n", err="")

    def prepare(self, request: RunRequest, environment: dict[str, str], folder: Path) -> SimpleNamespace:
        at = request.np, int(environment["HVDLAUNCH_SEED"])
        self.ran.append(at)
        self.environments.append(environment)
        self.keepers.add(request.attempt.keeper)
        self.done.append(f"np{at[0]}")
        plan = SimpleNamespace(remarks=("the ranks run on CPUs",))
        return SimpleNamespace(at=at, job=environment["HVDLAUNCH_JOB"], plan=plan)

    def run(self, prepared: SimpleNamespace, **_: object) -> RunResult:
        folder = Path("runs").resolve() / prepared.job
        if prepared.at in self.instead and (result := self.instead[prepared.at](folder)) is not None:
            return result
        return finished(folder)

    def ask(self, argv: list[str], *, timeout_s: float) -> Answer:
        assert argv == [sys.executable, "-m", "hvdtrain.compare", "--sweep", str(FILE)]
        assert written()  # whole whenever it is drawn
        self.done.append("draw")
        if isinstance(self.drawn, ProcessError):
            raise self.drawn
        return self.drawn


def finished(folder: Path, *, reason: str = "finished", seed: int | None = None) -> RunResult:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"exit_reason": reason}))
    (folder / "config.json").write_text(json.dumps({} if seed is None else {"seed": seed}))
    return RunResult(status=0, run_folder=str(folder), why=None, stopped=False)


def failed(folder: Path) -> RunResult:
    return RunResult(status=3, run_folder=str(folder), why="hvdtrain: too many skipped steps", stopped=False)


def written() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


def rows() -> dict[tuple[int, int], dict[str, Any]]:
    return {(row["np"], row["seed"]): row for row in written()["runs"]}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.chdir(tmp_path)
    for name in ("prepare", "run", "ask"):
        monkeypatch.setattr(sweep, name, getattr(made, name))
    return made


def test_every_size_and_seed_runs_once_small_first_and_is_drawn_after_each_size(machine, capfd):
    assert sweep.sweep(STUDY, {"SHELL": "sh"}) == 0
    assert machine.ran == ALL
    assert machine.done == ["np1", "np1", "draw", "np2", "np2", "draw", "np4", "np4", "draw"]
    assert len(machine.keepers) == 1  # for all runs
    assert machine.environments[3] == {"SHELL": "sh", "HVDLAUNCH_JOB": "mine-np2-seed1", "HVDLAUNCH_SEED": "1"}
    out, err = capfd.readouterr()
    assert out == "| ranks |\n"
    said = ["sweep: np 1 seed 0 (1 of 6)", "hvdlaunch: the ranks run on CPUs", "sweep: np 1 seed 1 (2 of 6)"]
    assert err.splitlines()[:3] == said
    assert err.count("the ranks run on CPUs") == 1
    machine.done = []
    assert sweep.sweep(replace(STUDY, price_per_gpu_hour=2.0), {}) == 0  # again: with the limits of this time
    assert (machine.done, written()["price_per_gpu_hour"]) == (["draw"], 2.0)


def test_a_repeated_sweep_runs_only_what_has_no_result(machine, capfd):
    sweep.sweep(STUDY, {})
    (Path(rows()[4, 0]["run_folder"]) / "result.json").unlink()
    machine.ran = []
    assert sweep.sweep(STUDY, {}) == 0
    assert machine.ran == [(4, 0)]
    err = capfd.readouterr().err
    assert f"sweep: np 1 seed 0 (1 of 6): finished before, {Path('runs/mine-np1-seed0').resolve()}" in err
    assert "have no result" not in err


def test_a_study_can_grow(machine):
    sweep.sweep(STUDY, {})
    machine.ran = []
    assert sweep.sweep(replace(STUDY, sizes=(4, 8), seeds=1), {}) == 0
    assert machine.ran == [(8, 0)]
    assert list(rows()) == [*ALL, (8, 0)]
    assert (written()["sizes"], written()["seeds"]) == ([1, 2, 4, 8], 2)


def test_a_size_that_cannot_be_started_is_a_row(machine, capfd):
    odd = HostError("h2 would fail: fix\nwhat follows", ["error: h2: torch 2.0", "    warning:\x1b h2: MTU 9000"])
    machine.instead = {(4, 0): Mock(side_effect=odd), (4, 1): Mock(side_effect=PlacementError("the same"))}
    assert sweep.sweep(STUDY, {}) == 1
    assert machine.ran == ALL
    why = "h2 would fail: fix what follows; error: h2: torch 2.0; warning:\\x1b h2: MTU 9000"
    assert rows()[4, 0] == {"np": 4, "seed": 0, "status": 2, "run_folder": None, "why": why}
    told = capfd.readouterr().err.splitlines()
    first = told.index("sweep: error: np 4 seed 0 cannot be started: h2 would fail: fix what follows")
    assert told[first + 1 : first + 3] == ["    error: h2: torch 2.0", "        warning:\\x1b h2: MTU 9000"]


def test_where_the_first_run_cannot_be_started_or_the_study_not_written_nothing_is_left(machine, monkeypatch):
    FILE.with_name("sweep.json.part").mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"sweeps/mine/sweep\.json cannot be written: Is a directory"):
        sweep.sweep(STUDY, {})
    assert not Path("runs").exists()
    shutil.rmtree("sweeps")
    monkeypatch.setattr(sweep, "prepare", Mock(side_effect=CommandError("run as root")))
    with pytest.raises(CommandError, match="run as root"):
        sweep.sweep(STUDY, {})
    assert not Path("sweeps").exists()


@pytest.mark.parametrize(
    ("ending", "status", "why"),
    [
        (lambda _: RunResult(status=143, run_folder="/runs/x", why="stopped by SIGTERM", stopped=True), 143, "stopped"),
        (lambda folder: replace(finished(folder, reason="preempted"), stopped=True), 1, "it ended before"),
        (lambda folder: finished(folder, reason="preempted"), 1, "it ended before it was finished: preempted"),
        (lambda _: RunResult(status=0, run_folder=None, why=None, stopped=False), 1, "the program told no run folder"),
        (lambda folder: replace(finished(folder), run_folder="/nowhere"), 1, "no result.json"),
        (failed, 1, "hvdtrain: too many skipped steps"),
    ],
    ids=["stopped", "stopped and saved", "preempted", "no folder", "no result", "failed"],
)
def test_a_run_without_a_finished_result_is_repeated_and_a_signal_ends_the_study(machine, capfd, ending, status, why):
    machine.instead = {(2, 0): ending}
    assert sweep.sweep(STUDY, {}) == status
    is_stopped = ending(Path("runs/x")).stopped
    assert machine.ran == (ALL[:3] if is_stopped else ALL)
    assert rows()[2, 0]["why"].startswith(why)
    err = capfd.readouterr().err
    assert ("sweep: error: 1 of 6 runs have no result. Run the same command again" in err) != is_stopped
    assert (f"sweep: warning: np 2 seed 0 has no result: {why}" in err) == (rows()[2, 0]["status"] == 0)
    machine.ran, machine.instead = [], {}
    assert sweep.sweep(STUDY, {}) == 0
    assert machine.ran == (ALL[2:] if is_stopped else [(2, 0)])


def test_runs_that_replace_each_others_folder_end_the_study(machine):
    machine.instead = dict.fromkeys(ALL, lambda folder: finished(folder.parent / "same"))
    with pytest.raises(LaunchError, match=r"np 1 seed 1 has replaced the run folder of np 1 seed 0, .*/same: leave"):
        sweep.sweep(STUDY, {})
    assert machine.ran == ALL[:2]


@pytest.mark.parametrize(("seed", "seeds", "lines"), [(5, 2, 1), (5, 1, 0), (None, 2, 0)])
def test_a_seed_that_the_program_does_not_take_is_told_once(machine, capfd, seed, seeds, lines):
    machine.instead = dict.fromkeys(ALL, lambda folder: finished(folder, seed=seed))
    assert sweep.sweep(replace(STUDY, seeds=seeds), {}) == 0
    assert capfd.readouterr().err.count(f"the program takes seed {seed} for every run") == lines


@pytest.mark.parametrize("answer", [Answer(status=1, out="", err="compare: no\n"), ProcessError("compare: no")])
def test_without_its_table_a_study_has_failed(machine, capfd, answer):
    machine.drawn = answer
    assert sweep.sweep(STUDY, {}) == 1
    assert capfd.readouterr().err.endswith("compare: no\n")
    assert all(row["why"] is None for row in rows().values())


def test_another_program_mode_or_way_to_run_is_another_study(machine, monkeypatch):
    monkeypatch.setattr(sweep, "ask", lambda *_, **__: machine.drawn)
    first = replace(STUDY, name=None, sizes=(1,), seeds=1)
    requests = [{"program": ("true",)}, {"gpus": "none"}, {"launcher": "horovodrun"}, {"binding": "cores"}]
    requests += [{"apptainer": "image.sif"}, {"network": "ib0"}]
    others = [replace(first, mode="strong"), *(replace(first, request=replace(REQUEST, **one)) for one in requests)]
    for study in (first, *others, replace(first, sizes=(8,), price_per_gpu_hour=1.0)):
        sweep.sweep(study, {})
    sweep.sweep(first, {"OMP_NUM_THREADS": "1", "NCCL_API_KEY": "s3cret"})
    sweep.sweep(first, {"OMP_NUM_THREADS": "1", "TORCH_HOME": "/of/this/job"})
    assert len(list(Path("sweeps").iterdir())) == 2 + len(others)
    assert not any("s3cret" in file.read_text() for file in Path("sweeps").glob("*/sweep.json"))
    sweep.sweep(replace(first, name="mine"), {})
    with pytest.raises(CommandError, match=r"sweeps/mine/sweep\.json is of another OMP_NUM_THREADS:"):
        sweep.sweep(replace(first, name="mine"), {"OMP_NUM_THREADS": "1"})
    for study in others:
        with pytest.raises(CommandError, match=r"sweeps/mine/sweep\.json is of another .*: choose another"):
            sweep.sweep(replace(study, name="mine"), {})


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [{"np": 1}]}'])
def test_a_damaged_study_is_named(machine, text):
    FILE.parent.mkdir(parents=True)
    FILE.write_text(text)
    with pytest.raises(CommandError, match=r"sweeps/mine/sweep\.json cannot be continued"):
        sweep.sweep(STUDY, {})
    assert FILE.read_text() == text
    assert machine.ran == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"seeds": 0}, "--seeds 0"),
        ({"price_per_gpu_hour": float("nan")}, "--price-per-gpu-hour nan"),
        ({"target": float("nan")}, "--target nan: pass a number"),
        ({"min_efficiency": 100.1}, "--min-efficiency 100.1: pass a percentage"),
        ({"name": "../up"}, "--name '../up'"),
    ],
)
def test_bad_numbers_and_names(machine, bad, says):
    assert refusal_of(CommandError, lambda: sweep.sweep(replace(STUDY, **bad), {})).startswith(says)
    assert machine.ran == []


@pytest.mark.parametrize("sizes", ["1,2,x", "0", "2,2", ""])
def test_bad_sizes(capfd, sizes):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sweep", f"-np={sizes}", "--", "true"])
    assert f"{sizes!r} is not a list of numbers of ranks" in capfd.readouterr().err


def test_the_command_line(monkeypatch):
    seen: list[Study] = []
    monkeypatch.setattr(sweep, "sweep", lambda study, _: seen.append(study) or 1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    words = "-np 4,1 --seeds 3 --mode strong --price-per-gpu-hour 2.5 --target-accuracy 95 --min-efficiency 80"
    more = "--max-accuracy-loss 1 --name here --gpus none -H a:2,b:2"
    with pytest.raises(SystemExit, match="1"):
        cli.main(["sweep", *words.split(), *more.split(), "--", "prog", "--seeds", "9"])
    asked = replace(REQUEST, np=4, program=("prog", "--seeds", "9"), hosts=hosts(a=2, b=2), gpus="none")
    asked = replace(asked, parameters=seen[0].request.parameters)
    assert seen == [Study(request=asked, sizes=(1, 4), seeds=3, mode="strong", name="here", **LIMITS)]
