"""A run that goes on with the hosts that are left: they die, go silent and come back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.run.supervise.spot.clouds import ADDRESS
from tests.cluster.hosts import PROJECT, Cluster
from tests.cluster.namespaces import Started
from tests.cluster.test_launch import ENV, HVDLAUNCH, nothing_left
from tests.metadata import TIME
from tests.mpi.conftest import wait_until

STEPS = ["python", str(PROJECT / "tests/mpi/programs/steps.py"), "."]
ENDLESS = ["--until", "enough"]
ALL = ("h1", "h2", "h3", "outside")
SLOW_S = 90  # of ranks that import torch on a busy machine


@contextlib.contextmanager
def running(
    hosts: Cluster, folder: Path, *words: str, start: str = "outside", hvdlaunch: Sequence[str] = (HVDLAUNCH,)
) -> Iterator[Started]:
    """hvdlaunch run --restarts 5 on a host, with these options; what it says goes to the file errors."""
    argv = [*hvdlaunch, "run", "--restarts", "5", "--silence-s", "4", *words]
    with (folder / "errors").open("w") as errors:
        job = hosts.start(start, argv, env=ENV, cwd=folder, stdout=errors, stderr=errors)
    try:
        yield job
    finally:
        job.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(10)


def attempts(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 knows of each attempt."""
    files = list(folder.glob("*/attempts.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def saved(folder: Path) -> int:
    """The newest checkpoint's step."""
    return max((int(file.read_text()) for file in folder.glob("*/checkpoint")), default=0)


def until(folder: Path, condition: Callable[[], bool], within_s: float = 40) -> None:
    wait_until(condition, within_s, folder / "errors")


def trains(folder: Path, attempt: int) -> None:
    """Wait until this attempt has saved something new."""
    until(folder, lambda: len(attempts(folder)) == attempt + 1)
    until(folder, lambda: saved(folder) > attempts(folder)[-1]["from"])


def kill_a_rank(hosts: Cluster, host: str) -> None:
    rank = next(pid for pid, argv in hosts.processes(host) if str(PROJECT / "tests/mpi/programs/steps.py") in argv[1:2])
    os.kill(rank, signal.SIGKILL)


def finish(folder: Path, job: Started) -> None:
    (folder / "enough").touch()
    assert job.wait(30) == 0, (folder / "errors").read_text()


def restarts(folder: Path) -> list[str]:
    return [
        line for line in (folder / "errors").read_text().splitlines() if line.startswith("hvdlaunch: warning: restart ")
    ]


def test_a_host_dies_and_the_others_go_on(cluster, tmp_path):
    hosts = cluster(hosts=3)
    with running(hosts, tmp_path, "-np", "4", "--min-np", "2", "-H", "h1:2,h2:1,h3:1", "--", *STEPS, *ENDLESS) as job:
        trains(tmp_path, 0)
        hosts.kill("h1")  # with rank 0
        trains(tmp_path, 1)
        finish(tmp_path, job)
    assert [one["hosts"] for one in attempts(tmp_path)] == [["h1", "h1", "h2", "h3"], ["h2", "h3"]]
    (line,) = restarts(tmp_path)
    step = attempts(tmp_path)[1]["from"]
    assert line == (
        "hvdlaunch: warning: restart 1 of 5 after: host h1 no longer answers; it had ranks 0, 1; 2 ranks on h2:1,h3:1, "
        f"from step {step}"
    )
    assert step >= 5
    nothing_left(hosts, ALL, within_s=5)


LOOKS_SOON = """
import sys
from launch.__main__ import main
from launch.run.supervise import growth
growth.LOOK_S = 2.0
sys.exit(main())
"""


def test_a_silent_host_is_left_out_and_joins_again(cluster, tmp_path):
    hosts = cluster(hosts=2)
    words = ("-np", "3", "--min-np", "2", "-H", "h1:2,h2:1", "--", *STEPS, *ENDLESS)
    with running(hosts, tmp_path, *words, hvdlaunch=[sys.executable, "-c", LOOKS_SOON]) as job:
        trains(tmp_path, 0)
        hosts.silence("h2")
        trains(tmp_path, 1)
        hosts.run("h2", ["iptables", "-F"])
        trains(tmp_path, 2)
        finish(tmp_path, job)
    assert [one["hosts"] for one in attempts(tmp_path)] == [["h1", "h1", "h2"], ["h1", "h1"], ["h1", "h1", "h2"]]
    said = (tmp_path / "errors").read_text()
    assert "after: host h2 no longer answers; it had rank 2; 2 ranks on h1:2" in said
    assert (
        f"hvdlaunch: note: host h2 is back or new; 3 ranks on h1:2,h2:1, from step {attempts(tmp_path)[2]['from']}\n"
        in said
    )
    assert len(restarts(tmp_path)) == 1
    nothing_left(hosts, ALL[:2], within_s=5)


def test_a_run_whose_rank_ends_beside_a_silent_host_goes_on(cluster, tmp_path):
    """mpirun waits without an end for the silent host's daemon if it is ending the ranks when the ssh to it ends."""
    hosts = cluster(hosts=2)
    words = ("--silence-s", "8", "-np", "2", "--min-np", "1", "-H", "h1:1,h2:1", "--", *STEPS, *ENDLESS)
    with running(hosts, tmp_path, *words, start="h1") as job:
        trains(tmp_path, 0)
        hosts.silence("h2")
        kill_a_rank(hosts, "h1")
        trains(tmp_path, 1)
        finish(tmp_path, job)
    assert "after: host h2 no longer answers; it had rank 1; 1 rank on h1:1" in restarts(tmp_path)[0]


@contextlib.contextmanager
def training_apart(hosts: Cluster, folder: Path, *, start: str) -> Iterator[Started]:
    """A training on all hosts, each with its own folder runs/, which has saved; it may end as long as it takes."""
    for host in hosts.names:
        assert hosts.run(host, ["mount", "--mkdir", "-t", "tmpfs", "tmpfs", folder / "runs"]).returncode == 0
    example = ["python", str(PROJECT / "examples/own_model.py"), "--epochs", "10000", "--checkpoint-every", "10steps"]
    on = ",".join(f"{host}:1" for host in hosts.names)
    words = ["-np", str(len(hosts.names)), "--min-np", "1", "-H", on, "--gpus", "none", "--", *example]
    with running(hosts, folder, *words, start=start) as job:
        until(folder, lambda: "epoch   3/" in (folder / "errors").read_text(), SLOW_S)
        yield job


def test_hosts_that_share_no_folder_go_on_from_the_memory_of_rank_0s_host(cluster, tmp_path):
    hosts, errors = cluster(hosts=3), tmp_path / "errors"
    with training_apart(hosts, tmp_path, start="h1") as job:
        for lost in ("h2", "h3"):
            hosts.kill(lost)
            until(tmp_path, lambda lost=lost: f" after: host {lost} no longer answers" in errors.read_text(), SLOW_S)
            trained = errors.read_text().count("epoch")
            until(tmp_path, lambda trained=trained: errors.read_text().count("epoch") > trained + 2, SLOW_S)
        job.terminate()
        assert job.wait(SLOW_S) == 0
    assert [line.rpartition("; ")[2].startswith("1 rank") for line in restarts(tmp_path)] == [False, True]
    assert all(line.endswith("in memory") for line in restarts(tmp_path)), restarts(tmp_path)
    assert errors.read_text().count("resumed from runs/") == 2


def test_without_a_shared_folder_the_loss_of_rank_0s_host_is_an_error_and_no_new_beginning(cluster, tmp_path):
    hosts = cluster(hosts=2)
    with training_apart(hosts, tmp_path, start="outside") as job:
        hosts.kill("h1")
        assert job.wait(SLOW_S) > 0
    said = (tmp_path / "errors").read_text()
    assert "error: host h1 had rank 0 and is left out, and the others do not share its run folder. To resume" in said


def test_what_a_rank_has_left_on_another_host_is_ended_before_the_restart(cluster, tmp_path):
    hosts = cluster(hosts=2)
    script = "[ $(hostname) = h1 ] && exec sleep 100; setsid sleep 300 & sleep 0.5; exit 9"
    with running(hosts, tmp_path, "-np", "2", "-H", "h1:1,h2:1", "--", "sh", "-c", script) as job:
        assert job.wait(60) == 9
    assert (tmp_path / "errors").read_text().count("hvdlaunch: note: 1 leftover processes killed on h2\n") == 6
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=2)


def test_with_too_few_hosts_it_waits_and_a_signal_ends_the_wait(cluster, tmp_path):
    hosts = cluster(hosts=2)
    with running(hosts, tmp_path, "-np", "2", "-H", "h1:1,h2:1", "--", *STEPS, *ENDLESS) as job:
        trains(tmp_path, 0)
        hosts.silence("h2")
        until(tmp_path, lambda: "1 slots are left, --min-np is 2. Waiting" in (tmp_path / "errors").read_text())
        job.terminate()
        assert job.wait(5) == 143
    nothing_left(hosts, ("h1", "outside"), within_s=5)


def test_a_host_with_a_notice_saves_with_the_others_which_go_on(cluster, tmp_path):
    hosts = cluster(hosts=2)
    log = tmp_path / "services"
    for host in ALL[:2]:
        assert hosts.run(host, ["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"]).returncode == 0
    with log.open("w") as out:
        words = [sys.executable, "-m", "tests.metadata", ADDRESS]
        services = [hosts.start(host, [*words, tmp_path / host], cwd=PROJECT, stdout=out) for host in ALL[:2]]
    wait_until(lambda: log.read_text().count("ready") == 2, 20, log)
    words = ("--spot", "aws", "-np", "3", "--min-np", "2", "-H", "h1:2,h2:1", "--", *STEPS, *ENDLESS)
    with running(hosts, tmp_path, *words) as job:
        trains(tmp_path, 0)
        (tmp_path / "h2").write_text(TIME)
        trains(tmp_path, 1)
        finish(tmp_path, job)
    assert [one["hosts"] for one in attempts(tmp_path)] == [["h1", "h1", "h2"], ["h1", "h1"]]
    why = f"host h2: AWS will terminate this instance at {TIME}"
    step = attempts(tmp_path)[1]["from"]
    assert restarts(tmp_path) == [f"hvdlaunch: warning: restart 1 of 5 after: {why}; 2 ranks on h1:2, from step {step}"]
    for each in services:
        each.kill()
    nothing_left(hosts, ALL[:2], within_s=7)
