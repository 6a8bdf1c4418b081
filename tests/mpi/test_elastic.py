"""Ranks are lost, and those that are left go on in place; under Open MPI 5, skipped with any other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.mpi.conftest import PROGRAMS, environment

TRAINING_IMAGES = 1438  # of the digits
LIMIT_S = 240
WORDS = ("--data", "digits", "--model", "efficientnet_tiny", "--report-every-steps", "3", "--run", "r")
PER_RANK = ("--batch-size-per-rank", "64")


def _open_mpi_5() -> bool:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return False
    return "Open MPI) 5" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(not _open_mpi_5(), reason="the MPI here is not Open MPI 5: make test-elastic sets that up"),
]


@pytest.fixture
def start(tmp_path):
    """Start so many ranks of a training that notes what it reads; the process of mpirun."""
    started = []

    def begin(np, *words, fault="", batch=PER_RANK):
        argv = ["mpirun", "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-np", str(np), sys.executable]
        argv += [str(PROGRAMS / "elastic_visits.py"), str(tmp_path / "notes"), "--elastic", *WORDS, *batch, *words]
        mine = {"HVDTRAIN_FAULT": fault} if fault else {}
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(
                argv,
                cwd=tmp_path,
                env={
                    **environment(tmp_path),
                    "OMPI_MCA_btl": "self,sm",
                    "PRTE_ALLOW_RUN_AS_ROOT": "1",
                    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "MPIEXEC_TIMEOUT": str(LIMIT_S),
                    **mine,
                },
                stdout=out,
                stderr=out,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def finished(process, tmp_path):
    assert process.wait(LIMIT_S + 20) == 0, (tmp_path / "out").read_text()
    return json.loads((tmp_path / "runs/effnet/r/result.json").read_text())


def losses(tmp_path):
    lines = (tmp_path / "runs/effnet/r/metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one.get("event") == "lost"]


def require_equal_replicas(tmp_path, ranks):
    facts = [json.loads((tmp_path / f"runs/effnet/r/ranks/rank-{rank}.json").read_text()) for rank in ranks]
    assert len({one["weights_sha256"] for one in facts}) == 1


def require_each_image_once(tmp_path, epochs):
    """In the steps that were taken, by whoever has read them."""
    reads, taken = [], set()
    for file in (tmp_path / "notes").glob("rank-*.jsonl"):
        for note in map(json.loads, file.read_text().splitlines()):
            place = note["changes"], note["step"]
            if note["what"] == "took":
                taken.add(place)
            else:
                reads.append((place, note["epoch"], note["samples"]))
    for epoch in range(epochs):
        seen = Counter(one for place, its, samples in reads if its == epoch and place in taken for one in samples)
        assert (len(seen), set(seen.values())) == (TRAINING_IMAGES, {1}), epoch


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_rank_may_die(start, tmp_path, rank):
    result = finished(start(3, "--epochs", "2", fault=f"kill@rank{rank}:step4"), tmp_path)
    left = [one for one in range(3) if one != rank]
    assert (result["exit_reason"], result["lost_ranks"], result["recoveries"], result["resumed"]) == (
        "finished",
        1,
        1,
        0,
    )
    [loss] = losses(tmp_path)
    assert (loss["step"], loss["ranks"], loss["np"]) == (3, [rank], 2)
    assert f"step 3: rank {rank} on {loss['hosts'][0]} lost; 2 ranks go on after " in (tmp_path / "out").read_text()
    require_equal_replicas(tmp_path, left)
    require_each_image_once(tmp_path, epochs=2)


def test_deaths_in_a_step_an_evaluation_and_a_save(start, tmp_path):
    faults = "kill@rank0:step3,raise@rank2:eval1,kill@rank3:save2"
    words = ("--epochs", "3", "--checkpoint-every-steps", "6")
    result = finished(start(4, *words, fault=faults), tmp_path)
    assert (result["exit_reason"], result["lost_ranks"], result["recoveries"]) == ("finished", 3, 3)
    assert [one["ranks"] for one in losses(tmp_path)] == [[0], [2], [3]]
    require_each_image_once(tmp_path, epochs=3)
    newest = json.loads(max((tmp_path / "runs/effnet/r/checkpoints").glob("step-*/manifest.json")).read_text())
    assert newest["about"]["np"] == 1
    assert newest["step"] == result["steps"]


def test_the_global_batch_is_kept_by_more_micro_batches(start, tmp_path):
    process = start(3, "--epochs", "1", fault="kill@rank1:step4", batch=("--global-batch-size", "96"))
    result = finished(process, tmp_path)
    assert result["steps"] == -(-TRAINING_IMAGES // 96)
    require_each_image_once(tmp_path, epochs=1)


def test_a_rank_that_is_stopped_is_ended_and_the_others_go_on(start, tmp_path):
    result = finished(start(3, "--epochs", "1", "--hang-timeout-s", "8", fault="stop@rank1:step4"), tmp_path)
    assert (result["exit_reason"], result["lost_ranks"]) == ("finished", 1)
    require_each_image_once(tmp_path, epochs=1)


def test_too_few_ranks_save_and_end(start, tmp_path):
    process = start(3, "--epochs", "2", "--min-np", "3", fault="kill@rank0:step4")
    assert process.wait(LIMIT_S + 20) == 1
    said = (tmp_path / "out").read_text()
    assert "2 ranks are left, fewer than --min-np 3: start it again, and it goes on from step 3" in said
    [saved] = (tmp_path / "runs/effnet/r/checkpoints").glob("step-*")
    assert saved.name == "step-000000003"
    assert json.loads((tmp_path / "runs/effnet/r/result.json").read_text())["exit_reason"] == "too few ranks"


def test_two_ranks_that_die_at_once(start, tmp_path):
    process = start(4, "--epochs", "2")
    ranks = [_pid(tmp_path, rank) for rank in (1, 2)]
    deadline = time.monotonic() + 200
    while not (tmp_path / "notes/rank-0.jsonl").exists() or "took" not in (tmp_path / "notes/rank-0.jsonl").read_text():
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    for rank in ranks:
        os.kill(rank(), signal.SIGKILL)
        time.sleep(0.03)
    result = finished(process, tmp_path)
    assert (result["exit_reason"], result["lost_ranks"]) == ("finished", 2)
    require_equal_replicas(tmp_path, [0, 3])
    require_each_image_once(tmp_path, epochs=2)


def _pid(tmp_path, rank):
    return lambda: json.loads((tmp_path / f"runs/effnet/r/ranks/rank-{rank}.json").read_text())["pid"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--stages", "2", "--accumulate-steps", "2"), "--elastic does not work with --stages 2"),
        (("--reducer", "horovod"), "--elastic does not work with --reducer horovod"),
        (("--min-np", "0"), "--min-np 0 must be at least 1"),
    ],
)
def test_what_cannot_go_on_is_refused(start, tmp_path, words, reason):
    assert start(2, *words).wait(LIMIT_S) == 2
    [line] = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("hvdtrain: ")]
    assert reason in line


def test_an_mpirun_without_ulfm_is_refused(tmp_path):
    argv = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-m", "hvdtrain.effnet", "--elastic", *WORDS]
    env = {**environment(tmp_path), "OMPI_MCA_btl": "self,sm"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "--elastic needs an MPI whose ranks outlive each other" in done.stderr
