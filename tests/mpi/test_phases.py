"""The verdict names the cause that was planted, in real runs."""

import gzip
import json
import socket

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.core.phases import PHASES
from hvdtrain.insight.profiling.clocks import WARMUP_STEPS
from hvdtrain.insight.profiling.parts import PARTS, WAITING
from hvdtrain.insight.profiling.passes import BLOCK_STEPS
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
        ("sums", "communication-bound", "--compression"),
        ("rank", "straggler", f"rank 1 on {socket.gethostname()}, whose forward"),
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


def test_a_slow_rank_is_named_without_a_profile(run, tmp_path):
    done = run("mpirun", 2, [PLANTED, "rank", *QUICK, *BATCH, "--epochs", "2", "--report-every-steps", "5"])
    assert done.returncode == 0, done.stdout + done.stderr
    late = load(tmp_path, "result.json")["straggler"]
    assert (late["rank"], late["host"], late["ranks"]) == (1, socket.gethostname(), "rank 1")
    assert 0.5 < late["share"] < 1
    (said,) = [line for line in done.stdout.splitlines() if "straggler" in line]
    assert f"host {socket.gethostname()} (rank 1) made the others wait {late['lag_s']:.1f} s" in said
    board = EventAccumulator(str(tmp_path / "runs" / "effnet" / "r")).Reload()
    own_ms = [board.Scalars(f"train_by_rank/own_ms_rank{rank}")[-1].value for rank in (0, 1)]
    assert own_ms[1] > 400 > own_ms[0]
    assert b"(rank 1)" in board.Tensors("straggler")[0].tensor_proto.string_val[0]


def test_traces_are_readable(run, tmp_path):
    traced = ["--torch-profile", "2", "--profile=exact"]
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r", "--epochs", "3", *traced])
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
    assert load(tmp_path, "phases.json")["steps"] == BLOCK_STEPS - 1


def test_a_timeline_is_readable_and_measures_nothing(run, tmp_path):
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r", "--profile=timeline"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(event.get("name") == "MPI_ALLREDUCE" for event in load(tmp_path, "timeline.json"))
    assert "profile" not in load(tmp_path, "result.json")


def weights(tmp_path, name):
    return {
        json.loads(file.read_text())["weights_sha256"]
        for file in (tmp_path / "runs" / "effnet" / name / "ranks").glob("rank-*.json")
    }


def test_two_passes_find_both_costs_and_change_no_weight(run, tmp_path):
    words = [*EFFNET, *QUICK, "--batch-size-per-rank", "20", "--reducer", "horovod", "--fusion-groups", "3"]
    plain = run("mpirun", 2, [*words, "--run", "plain"])
    done = run("mpirun", 2, [*words, "--run", "r", "--profile=exact"])
    assert plain.returncode == done.returncode == 0, done.stdout + done.stderr
    assert weights(tmp_path, "r") == weights(tmp_path, "plain")
    assert len(weights(tmp_path, "r")) == 1

    phases = load(tmp_path, "phases.json")
    parts = {one["part"]: one for one in phases["parts"]}
    assert list(parts) == [*PARTS, WAITING]
    assert parts["sync"]["own_s"] > 0
    for one in parts.values():
        assert 0 <= one["exposed_s"] <= phases["whole_step_s"]
    assert phases["steps"] == BLOCK_STEPS - 1
    for one in phases["ranks"]:
        assert set(one["alone_s"]) == set(PHASES)
    assert phases["parts_sentence"] in done.stdout
