"""hvdlaunch over several hosts: who runs where, one clear line for each fault, and nothing left on any host."""

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import PROJECT, TMP, Cluster
from tests.cluster.namespaces import Started
from tests.mpi.conftest import EFFNET, PROGRAMS, wait_until
from tests.mpi.launched import argv, finished

BIN = Path(sys.prefix) / "bin"
HVDLAUNCH = BIN / "hvdlaunch"
ENV = {"PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}
NOTE = PROGRAMS / "place.py"
TRAIN = (
    *("python", *EFFNET, "--data", "digits", "--model", "efficientnet_tiny"),
    *("--epochs", "1", "--batch-size-per-rank", "64", "--ema-epochs", "0", "--reducer", "horovod", "--deterministic"),
)
MakeCluster = Callable[..., Cluster]


def hvdlaunch(
    cluster: Cluster,
    start: str,
    folder: Path,
    hosts: str,
    *words: str,
    launcher: str = "mpirun",
    env: Mapping[str, str] = ENV,
):
    ranks = sum(int(one.split(":")[1]) for one in hosts.split(","))
    options = ["run", "-np", str(ranks), "-H", hosts, "--launcher", launcher]
    began = time.monotonic()
    done = cluster.run(start, [HVDLAUNCH, *options, *words], env=env, cwd=folder, timeout_s=200)
    return done, time.monotonic() - began


def notes(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have written, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def one_line(text: str) -> str:
    """The only line that is not the remark about CPUs, and not indented below it."""
    lines = [line for line in text.splitlines() if line[:1] != " " and "running on CPU" not in line]
    assert len(lines) == 1, text
    return lines[0]


def start_sleepers(
    cluster: Cluster, folder: Path, *words: str, start: str = "outside", for_s: int = 100, env: Mapping[str, str] = ENV
) -> tuple[Started, Path]:
    """hvdlaunch with ranks that sleep on h1:2,h2:1, once they do; and the file of what it says."""
    errors = folder / "errors"
    program = f"touch {shlex.quote(str(folder))}/$OMPI_COMM_WORLD_RANK; exec sleep {for_s}"
    argv = [HVDLAUNCH, "run", "-np", "3", "-H", "h1:2,h2:1", *words, "--", "sh", "-c", program]
    with errors.open("w") as stderr:
        started = cluster.start(start, argv, env=env, cwd=folder, stderr=stderr)
    wait_until(lambda: all((folder / str(rank)).exists() for rank in range(3)), 30, errors)
    return started, errors


def nothing_left(cluster: Cluster, hosts: tuple[str, ...], within_s: float) -> None:
    wait_until(lambda: not any(cluster.processes(host) for host in hosts), within_s)


@pytest.mark.parametrize(
    ("launcher", "start", "listed"),
    [("mpirun", "h3", "h2:1,h1:2,h3:1"), ("horovodrun", "outside", "h1:2,h2:1,h3:1")],
)
def test_every_rank_is_where_it_was_planned(
    cluster: MakeCluster, tmp_path: Path, *, launcher: str, start: str, listed: str
) -> None:
    """Also where the list does not begin with the host that mpirun starts on, which it counts first."""
    hosts = cluster(hosts=3)
    program = ("--", "python", str(NOTE), str(tmp_path))
    done, _ = hvdlaunch(hosts, start, tmp_path, listed, *program, launcher=launcher)
    assert done.returncode == 0, done.stderr
    found = notes(tmp_path)
    order = sorted((one.split(":") for one in listed.split(",")), key=lambda one: one[0] != start)
    planned = [(host, local) for host, slots in order for local in range(int(slots))]
    assert [(note["host"], note["local_rank"]) for note in found] == planned
    assert [note["rank"] for note in found] == list(range(len(planned)))
    for note in found:
        assert note["planned_on"] == note["host"]
        assert note["environment"]["NCCL_SOCKET_IFNAME"] == hosts.nic(note["host"])  # each host calls it otherwise
        assert note["environment"]["CUDA_VISIBLE_DEVICES"] == ""
        assert note["folder"] == str(tmp_path)


def test_the_same_weights_on_one_host_and_on_two(cluster: MakeCluster, tmp_path: Path) -> None:
    train = (*TRAIN, "--batch-size-per-rank", "240", "--run")  # two steps of many sums each
    alone = finished(tmp_path, argv("-np", "3", program=[*train, "one"]))  # on this machine, by forks
    words = ("-x", "OMP_NUM_THREADS", "--", *train, "two")
    done, _ = hvdlaunch(cluster(hosts=2), "outside", tmp_path, "h1:2,h2:1", *words)
    weights = {}
    for run, started in (("one", alone), ("two", done)):
        assert started.returncode == 0, started.stderr
        ranks = [json.loads((tmp_path / f"runs/effnet/{run}/ranks/rank-{rank}.json").read_text()) for rank in range(3)]
        weights[run] = {rank["weights_sha256"] for rank in ranks}
        placement = json.loads((tmp_path / f"runs/effnet/{run}/placement.json").read_text())
        places = [(slot["hostname"], slot["local_rank"]) for slot in placement["plan"]["ranks"]]
        assert [(rank["host"], rank["local_rank"]) for rank in ranks] == places
    assert len(weights["one"]) == 1
    assert weights["one"] == weights["two"]


def test_hosts_that_cannot_take_part_are_all_named_before_anything_starts(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=9)
    hosts.refuse_ssh("h1")
    hosts.change_host_key("h2")
    hosts.forget_host_key("h3")
    hosts.prompt_for_password("h4")
    hosts.mute_sshd("h5")
    hosts.kill("h6")
    hosts.hide("h7", PROJECT / "launch")
    hosts.hide("h8", BIN)
    hosts.hide("h9", PROJECT / "launch/hosts/slurm.py")
    listed = ",".join(f"{name}:1" for name in ("outside", *hosts.names, "h10"))
    done, took_s = hvdlaunch(hosts, "outside", tmp_path, listed, "--", "touch", str(tmp_path / "started"))
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("hvdlaunch: error: 10 of 11 hosts cannot be used: h1, h2, h3, h4, h5,")
    said = re.findall(r"^    host (\w+): (.*)", done.stderr, re.MULTILINE)
    facts = {
        "h1": "connection refused",
        "h2": "its host key has changed",
        "h3": "its host key is unknown. Run `ssh h3` once to accept it.",
        "h4": "ssh asks for a password. Copy your key: `ssh-copy-id h4`",
        "h5": "ssh to h5 timed out",
        "h6": "no route to h6",
        "h7": "cannot import hvdlaunch",
        "h8": " does not exist",
        "h9": "it has version ",
        "h10": "unknown host name",
    }
    assert {host for host, _ in said} == facts.keys(), done.stderr
    assert [line for host, line in said if facts[host] not in line] == []
    assert "        root@h4: Permission denied (password)." in done.stderr.splitlines()  # what ssh has said
    assert took_s < 20
    assert not (tmp_path / "started").exists()
    nothing_left(hosts, (*hosts.names, "outside"), within_s=2)


def test_another_mpi_first_on_a_hosts_path_does_not_start(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    for name in ("mpirun", "orted"):
        hosts.put_on_path("h2", name, f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path))}/wrong\nexit 1\n")
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:2,h2:1", "--", "true")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("launcher", "start", "fault", "limit_s"), [("mpirun", "outside", "kill", 5), ("horovodrun", "h1", "silence", 15)]
)
def test_a_host_that_is_lost_ends_the_run_and_is_named(
    cluster: MakeCluster, tmp_path: Path, *, launcher: str, start: str, fault: str, limit_s: float
) -> None:
    hosts = cluster()
    started, errors = start_sleepers(hosts, tmp_path, "--launcher", launcher, "--silence-s", "4", start=start)
    getattr(hosts, fault)("h2")
    began = time.monotonic()
    assert started.wait(60) not in (0, 2)
    assert time.monotonic() - began < limit_s
    assert one_line(errors.read_text()) == "hvdlaunch: error: host h2 no longer answers; it had rank 2"
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=limit_s)


def test_a_silence_that_ends_in_time_ends_no_run(cluster: MakeCluster, tmp_path: Path) -> None:
    """A link may lose every packet for less than --silence-s."""
    hosts = cluster()
    started, errors = start_sleepers(hosts, tmp_path, "--silence-s", "10", for_s=12)
    hosts.silence("h2")
    time.sleep(6)
    hosts.run("h2", ["iptables", "-F"])
    assert started.wait(40) == 0, errors.read_text()


def test_in_a_job_of_a_batch_system_daemons_start_by_ssh_and_this_host_has_any_of_its_names(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    (tmp_path / "bin/lx").mkdir(parents=True)
    qrsh = tmp_path / "bin/lx/qrsh"
    qrsh.write_text("#!/bin/sh\nexit 1\n")
    qrsh.chmod(0o755)
    (tmp_path / "hosts").write_text("h1 2 all.q@h1 UNDEFINED\nh2 1 all.q@h2 UNDEFINED\n")
    sge = {"SGE_ROOT": str(tmp_path), "ARC": "lx", "PE_HOSTFILE": str(tmp_path / "hosts"), "JOB_ID": "47"}
    program = ("--", "sh", "-c", "hostname >> names")
    done, _ = hvdlaunch(cluster(), "h1", tmp_path, "H1:2,h2:1", *program, env={**ENV, **sge})
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "names").read_text().split()) == ["h1", "h1", "h2"]


def test_no_rank_survives_hvdlaunch_on_any_host(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    started, _ = start_sleepers(hosts, tmp_path)
    started.kill()  # not the keeper that it has forked, which looks the same
    started.wait(10)
    wait_until(lambda: not any("sleep" in one.argv for host in ("h1", "h2") for one in hosts.processes(host)), 5)
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=20)  # mpirun's daemons take longer than the ranks


def test_sigusr1_reaches_the_ranks_of_each_host_once_they_catch_it(cluster: MakeCluster, tmp_path: Path) -> None:
    """Bash would die of it before."""
    hosts = cluster()
    file = f"{shlex.quote(str(tmp_path))}/$OMPI_COMM_WORLD_RANK"
    program = (
        f"touch {file}; while ! [ -e {file}.go ]; do sleep 0.1; done; trap 'echo caught; exit' USR1; sleep 60 & wait"
    )
    argv = [HVDLAUNCH, "run", "-np", "3", "-H", "outside:1,h1:1,h2:1", "--show", "all", "--", "bash", "-c", program]
    with (tmp_path / "out").open("w") as out:
        started = hosts.start("outside", argv, env=ENV, cwd=tmp_path, stdout=out, stderr=out)
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 30)
    started.send_signal(signal.SIGUSR1)
    time.sleep(2)
    for rank in range(3):
        (tmp_path / f"{rank}.go").touch()
    assert started.wait(30) == 0, (tmp_path / "out").read_text()
    assert sorted(re.findall(r"\[(\d)\] caught", (tmp_path / "out").read_text())) == ["0", "1", "2"]


# ompiEnvVars of pkg/controller/mpi_job_controller.go in kubeflow/mpi-operator
OPERATORS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "2",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


def test_the_hostfile_of_the_pod_is_the_default(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    (tmp_path / "hostfile").write_text("h1 slots=2\nh2 slots=2\n")
    env = {**ENV, **OPERATORS, "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile")}
    words = ["run", "-np", "3", "--", "python", NOTE, tmp_path]
    done = hosts.run("outside", [HVDLAUNCH, *words], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    places = [(note["host"], note["local_rank"]) for note in notes(tmp_path)]
    assert places == [("h1", 0), ("h1", 1), ("h2", 0)]


def test_each_host_keeps_its_logs_and_a_failed_rank_is_quoted(cluster: MakeCluster) -> None:
    """They share no folder."""
    hosts, here = cluster(), TMP / "here"
    for name in ("outside", "h1", "h2"):
        assert hosts.run(name, ["mkdir", here]).returncode == 0
    program = "echo I am $OMPI_COMM_WORLD_RANK; [ $OMPI_COMM_WORLD_RANK = 2 ] && exit 3; sleep 100"
    done, _ = hvdlaunch(hosts, "outside", here, "h1:2,h2:1", "--", "sh", "-c", program)
    assert (done.returncode, done.stdout) == (3, "I am 0\n"), done.stderr
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=2)
    kept = {name: hosts.run(name, ["sh", "-c", f"cat {here}/logs/*/rank-*"]).stdout for name in ("outside", "h1", "h2")}
    assert kept == {"outside": "", "h1": "I am 0\nI am 1\n", "h2": "I am 2\n"}
    file = hosts.run("h2", ["sh", "-c", f"ls {here}/logs/*/rank-2.log"]).stdout.strip()
    assert done.stderr.splitlines()[-3:] == [
        "hvdlaunch: error: rank 2 on h2 ended with status 3; its last words:",
        "    I am 2",
        f"    {file}",
    ]
