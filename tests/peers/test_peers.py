"""A program of each library trains, fails and is stopped under hvdlaunch as under torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.mpi.conftest import wait_until
from tests.peers.conftest import PROJECT
from tests.peers.launchers import ALLOCATION, TIMEOUT_S, environment, started, status_of

LAUNCHERS = ("torchrun", "hvdlaunch")
PEERS = {
    "torch": "ddp",
    "lightning": "trainer_of_lightning",
    "lightning.fabric": "fabric",
    "accelerate": "with_accelerate",
    "transformers": "trainer",
    "deepspeed": "with_deepspeed",
}
# Variables of torchrun's agent: where it keeps its store and its workers' tracebacks, and the signals it takes.
OF_THE_AGENT = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OF_A_JOB = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


@pytest.fixture(scope="module", params=PEERS)
def peer(request):
    if (
        request.param == "deepspeed"
    ):  # compiles its operator for CPUs once, for a minute, before ranks would wait for it
        build = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
        subprocess.run([sys.executable, "-c", build], env=environment(), check=True, timeout=600)
    return request.param


@pytest.fixture
def program(peer):
    return str(PROJECT / "tests" / "peers" / "programs" / f"{PEERS[peer]}.py")


@pytest.fixture
def row(peer):
    return "peers", {"program": peer, "version": version(peer.partition(".")[0])}


@pytest.fixture(scope="module")
def trained(peer, tmp_path_factory):
    """The folder of an undisturbed training under each launcher, and under hvdlaunch in an allocation of Slurm."""
    program = str(PROJECT / "tests" / "peers" / "programs" / f"{PEERS[peer]}.py")
    folders = {name: tmp_path_factory.mktemp(name) for name in (*LAUNCHERS, "slurm")}
    for name, folder in folders.items():
        launcher, allocation = ("hvdlaunch", ALLOCATION) if name == "slurm" else (name, {})
        (folder / "status").write_text(str(status_of(folder, launcher, program, **allocation)))
    return folders


def facts(folder):
    assert (folder / "status").read_text() == "0", (folder / "err").read_text()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "column"), [("hvdlaunch", "losses"), ("slurm", "losses in a Slurm job")])
def test_ranks_and_losses_are_the_same(trained, row, note, name, column):
    seen = ("losses", "rank", "world_size", "python")
    wanted = [[rank[key] for key in seen] for rank in facts(trained["torchrun"])]
    note(*row, **{column: "differ"})
    found = [[rank[key] for key in seen] for rank in facts(trained[name])]
    note(*row, **{column: "same" if found == wanted else "differ"})
    assert [rank[1:3] for rank in wanted] == [[0, 2], [1, 2]]
    assert found == wanted


def test_the_variables_of_torchrun_are_set(trained, row, note):
    wanted, found = ([rank["environment"] for rank in facts(trained[name])] for name in LAUNCHERS)
    missing = sorted(set().union(*wanted) - set.intersection(*map(set, found)) - OF_THE_AGENT)
    note(*row, missing_variables=len(missing))
    assert missing == []
    for rank, of_torchrun in zip(found, wanted, strict=True):
        same = set(of_torchrun) - OF_THE_AGENT - OF_A_JOB
        assert {name: rank[name] for name in same} == {name: of_torchrun[name] for name in same}


def test_standard_output_and_errors_stay_apart(trained, row, note):
    def lines(name, stream):
        printed = (trained[name] / stream).read_text()
        return [f"{kind} of {rank}" in printed for kind in ("output", "errors") for rank in range(2)]

    streams = {name: (lines(name, "out"), lines(name, "err")) for name in LAUNCHERS}
    note(*row, streams="same" if streams["torchrun"] == streams["hvdlaunch"] else "differ")
    assert streams["torchrun"] == ([True, True, False, False], [False, False, True, True])
    assert streams["hvdlaunch"] == streams["torchrun"]


def test_a_failing_rank_ends_the_job(program, row, note, tmp_path):
    statuses = [status_of(tmp_path / name, name, program, PEERS_CASE="fail") for name in LAUNCHERS]
    note(*row, status_if_rank_1_exits_with_7=", ".join(map(str, statuses)))
    assert statuses == [1, 7]  # hvdlaunch's is that of the rank


def stopped(folder, launcher, program):
    """What each rank has noted of SIGUSR1 and then SIGTERM, and the exit status.

    hvdlaunch hands on SIGUSR1; torchrun does not handle it, so its ranks receive it directly.
    """
    pids, noted = ([folder / f"{name}-{rank}" for rank in range(2)] for name in ("pid", "signals"))

    def are_ready():
        return all(file.exists() and file.read_text() for file in pids)

    with started(folder, launcher, program, PEERS_CASE="wait") as process:
        wait_until(lambda: are_ready() or process.poll() is not None, TIMEOUT_S)
        assert are_ready(), (folder / "err").read_text()
        for pid in [process.pid] if launcher == "hvdlaunch" else [int(file.read_text()) for file in pids]:
            os.kill(pid, signal.SIGUSR1)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all("SIGUSR1" in file.read_text() for file in noted), 10)
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    return [file.read_text() for file in noted], status


def test_signals_reach_the_program(program, row, note, tmp_path):
    (of_torchrun, *_), (of_hvdlaunch, *_) = ends = [stopped(tmp_path / name, name, program) for name in LAUNCHERS]
    statuses = [status for _, status in ends]
    same = "same" if of_torchrun == of_hvdlaunch else "differ"
    note(*row, signals=same, status_after_SIGTERM=", ".join(map(str, statuses)))
    assert [of_torchrun, of_hvdlaunch] == [["SIGUSR1 SIGTERM"] * 2] * 2
    assert statuses == [1, 128 + signal.SIGTERM]
