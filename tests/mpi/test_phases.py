"""The verdict names the cause that was planted, in real runs."""

import gzip
import json
import socket

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.timing.phases import PHASES, WARMUP_STEPS
from hvdtrain.timing.trace import BEFORE_STEPS
from tests.mpi.conftest import EFFNET, PROGRAMS, QUICK

pytestmark = pytest.mark.slow

PLANTED = str(PROGRAMS / "planted.py")
BATCH = ["--batch-size-per-rank", "45", "--run", "r"]  # of 2 ranks: 16 steps


def load(tmp_path, name):
    return json.loads((tmp_path / "runs" / "effnet" / "r" / name).read_text())


@pytest.mark.parametrize(
    ("cause", "verdict", "named"),
    [
        ("dataset", "input-bound", "dataset read"),
        ("rank", "straggler", f"rank 1 on {socket.gethostname()}, whose forward"),
        ("forward", "compute-bound", "forward to optimizer"),
    ],
)
def test_the_verdict_names_the_planted_cause(run, tmp_path, cause, verdict, named):
    done = run("mpirun", 2, [PLANTED, cause, *QUICK, *BATCH, "--profile"])
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(tmp_path, "result.json")["profile"]
    assert found["verdict"] == verdict, found
    assert found["share"] > 0.3
    assert (found["rank"], found["host"]) == ((1, socket.gethostname()) if cause == "rank" else (None, None))
    lines = [line for line in done.stdout.splitlines() if line.startswith(verdict)]
    assert lines == [found["sentence"]]
    assert named in lines[0]
    phases = load(tmp_path, "phases.json")
    assert phases["verdict"] == verdict
    assert phases["steps"] == 16 - WARMUP_STEPS
    for one in phases["ranks"]:
        assert one["step_s"] == pytest.approx(sum(one["phases_s"].values()))
    if cause == "rank":
        assert phases["slowest"]["rank"] == 1
        assert phases["phases"]["forward"]["max_rank"] == 1
        assert phases["phases"]["sync"]["max_rank"] == 0  # it waits for the other
    folder = tmp_path / "runs" / "effnet" / "r"
    assert (folder / "phases.png").stat().st_size > 10_000
    assert [one.step for one in EventAccumulator(str(folder)).Reload().Images("phases")] == [16]


def test_a_fat_model_over_tcp_is_bound_by_communication(run_program):
    tcp = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    answers = run_program("mpirun", 2, "fat_model.py", **tcp)
    assert answers[0] == answers[1]
    assert answers[0]["verdict"] == "communication-bound", answers[0]
    assert all(option in answers[0]["sentence"] for option in ("--accumulate-steps", "--compression"))


def test_traces_and_timeline_are_readable(run, tmp_path):
    traced = ["--torch-profile", "2", "--timeline", "--profile=exact"]
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r", "--epochs", "1", *traced])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    for rank in (0, 1):
        with gzip.open(folder / "profile" / f"rank-{rank}.pt.trace.json.gz") as text:
            events = json.load(text)["traceEvents"]
        names = [event.get("name") for event in events]
        assert names.count("ProfilerStep#3") == names.count("ProfilerStep#4") == 1
        assert names.count("backward") == names.count("sync") == 2
    assert not list((folder / "profile").glob("part-*"))
    timeline = json.loads((folder / "timeline.json").read_text())
    assert any(event.get("name") == "MPI_ALLREDUCE" for event in timeline)
    assert load(tmp_path, "phases.json")["steps"] == 12 - BEFORE_STEPS - 2 - 1


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--torch-profile", "9"], ["9", "11", "--epochs"]), (["--timeline"], ["--timeline", "mpirun"])],
)
def test_what_cannot_be_traced_is_refused(run, tmp_path, words, named):
    done = run("python", 1, [*EFFNET, *QUICK, "--batch-size-per-rank", "140", *words])
    assert done.returncode == 2
    line = done.stderr.strip()
    assert "\n" not in line
    assert all(word in line for word in named), line
    assert not (tmp_path / "runs").exists()


def test_a_plain_run_is_bound_by_its_compute(run, tmp_path):
    done = run("python", 1, [*EFFNET, *QUICK, *BATCH, "--profile", "--accumulate-steps", "2"])
    assert done.returncode == 0, done.stdout + done.stderr
    phases = load(tmp_path, "phases.json")
    assert phases["verdict"] == "compute-bound", phases
    assert set(phases["phases"]) == set(PHASES)
    assert all(phases["phases"][phase]["median_s"] > 0 for phase in PHASES)
