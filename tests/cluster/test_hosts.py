"""The hosts themselves, with the real ssh and the real mpirun; hvdlaunch is not needed here."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import namespaces
from tests.cluster.hosts import PROJECT, SUBNET, Cluster, Host

MPIRUN = shutil.which("mpirun", path=f"{sys.prefix}/bin:{os.environ.get('PATH', '')}")
PROGRAM = Path(__file__).parent / "programs/ranks.py"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MPIEXEC_TIMEOUT": "100"}
STRICT = ["-oBatchMode=yes", "-oStrictHostKeyChecking=yes"]
OWN = [Path(folder) / f"mine-{os.getpid()}" for folder in ("/tmp", "/dev/shm", "/run")]  # noqa: S108
END_S = 20  # a job that has lost a host ends in about 1 s, one whose host went silent in about 5

MakeCluster = Callable[..., Cluster]


def ssh(cluster: Cluster, host: str, *words: str, start: str = "outside") -> subprocess.CompletedProcess[str]:
    return cluster.run(start, ["ssh", *STRICT, "-oConnectTimeout=2", host, *words], timeout_s=20)


def mpirun(hosts: str, ranks: int, folder: Path, *words: str) -> list[str | Path]:
    """Rank programs that write into `folder`, by the mpirun of this environment, over the cluster's network only."""
    assert MPIRUN is not None
    settings = {
        "oob_tcp_if_include": SUBNET,
        "btl_tcp_if_include": SUBNET,
        "oob_tcp_keepalive_time": "2",
        "oob_tcp_keepalive_intvl": "1",
        "oob_tcp_keepalive_probes": "3",
        "plm_rsh_args": " ".join([*STRICT, "-oServerAliveInterval=2", "-oServerAliveCountMax=2"]),
    }
    flags = [word for name, value in settings.items() for word in ("--mca", name, value)]
    program: list[str | Path] = [sys.executable, PROGRAM, folder, *words]
    return [MPIRUN, "-np", str(ranks), "-H", hosts, "--bind-to", "none", *flags, *program]


def ranks_in(folder: Path) -> list[tuple[int, int, str]]:
    """(rank, local rank, host) as the ranks wrote them down."""
    facts = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return sorted((fact["rank"], fact["local_rank"], fact["host"]) for fact in facts)


def wait_for(condition: Callable[[], object], seconds: float = END_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def machine() -> tuple[str, str]:
    """What a cluster must not touch: the machine's interfaces and mounts."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return links, Path("/proc/self/mountinfo").read_text()


def living_in(folder: Path) -> list[str]:
    """Pids of the processes, on all hosts, that have to do with a folder by their mounts, their words or their log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = str((process / "fd/2").readlink())
            if str(folder) in (process / "mountinfo").read_text() + (process / "cmdline").read_text() + log:
                found.append(process.name)
    return found


# One host each


def test_every_host_has_its_own_name_address_and_nic_and_the_same_docker0(cluster: MakeCluster) -> None:
    made = cluster(hosts=3)
    assert made.names == ("h1", "h2", "h3")
    assert len({made.nic(host) for host in made.names}) == 3
    for host in (*made.names, "outside"):
        answer = ssh(made, host, "hostname; cat /proc/sys/kernel/hostname; ip -o -4 address; ls /sys/class/net")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.splitlines()[:2] == [host, host]
        assert f"{made.nic(host)}    inet {made.address(host)}/24" in answer.stdout
        assert "docker0    inet 172.17.0.1/16" in answer.stdout
        assert set(answer.stdout.split()[-5:]) == {made.nic(host), "docker0", "lo", "veth0", "veth1"}


def test_hosts_share_the_project_and_the_tests_folder_and_nothing_else(cluster: MakeCluster, tmp_path: Path) -> None:
    made = cluster()
    (tmp_path / "ours").touch()
    made.run("h1", ["touch", *OWN, tmp_path / "too"])
    for host in made.names:
        assert made.run(host, ["ls", tmp_path / "ours", tmp_path / "too", PROJECT]).returncode == 0
        assert made.run(host, [sys.executable, "-c", "import mpi4py"]).returncode == 0
        for path in OWN:
            assert (made.run(host, ["ls", path]).returncode == 0) == (host == "h1"), (host, path)
    assert not any(path.exists() for path in OWN)


def test_processes_are_those_of_one_host_without_its_sshd(cluster: MakeCluster) -> None:
    made = cluster()
    assert made.processes("h1") == made.processes("h2") == []
    made.start("outside", ["ssh", *STRICT, "h1", "sleep 1000"])
    wait_for(lambda: ["sleep", "1000"] in [process.argv for process in made.processes("h1")])
    assert made.processes("h2") == []
    (sleeping,) = [process for process in made.processes("h1") if process.argv == ["sleep", "1000"]]
    os.kill(sleeping.pid, signal.SIGKILL)
    wait_for(lambda: not made.processes("h1"))


def test_a_program_on_a_host_gets_its_signals_and_gives_its_status(cluster: MakeCluster) -> None:
    made = cluster()
    words = ["sh", "-c", "echo $HOME $WORD; pwd; echo bad >&2; exit 7"]
    done = made.run("h1", words, env={"WORD": "x"}, cwd=Path("/run/sshd"))
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{made.home('h1')} x\n/run/sshd\n", "bad\n")
    trap = made.start("h1", ["sh", "-c", "trap 'exit 9' USR1; touch ready; while :; do sleep 0.05; done"])
    wait_for((made.home("h1") / "ready").exists)
    trap.send_signal(signal.SIGUSR1)
    assert trap.wait(END_S) == 9
    for number in (signal.SIGTERM, signal.SIGKILL):
        sleeping = made.start("h1", ["sleep", "1000"])
        sleeping.send_signal(number)
        assert sleeping.wait(END_S) == -number
    stopped = made.start("h1", ["sleep", "1000"])
    stopped.send_signal(signal.SIGSTOP)
    stopped.kill()
    assert stopped.wait(END_S) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired) as late:
        made.run("h1", ["sh", "-c", "echo so far; sleep 1000"], timeout_s=0.5)
    assert late.value.output == "so far\n"


def test_the_login_path_lacks_the_environment_and_takes_programs(cluster: MakeCluster) -> None:
    made = cluster()
    made.put_on_path("h2", "mpirun", "#!/bin/sh\necho another MPI\n")
    for host, words in (("h1", ""), ("h2", "another MPI\n")):
        assert ssh(made, host, "mpirun").stdout == made.run(host, ["sh", "-c", "mpirun"]).stdout == words
        assert sys.prefix not in ssh(made, host, "echo $PATH").stdout


def test_what_is_hidden_is_hidden_on_one_host_only(cluster: MakeCluster) -> None:
    made = cluster()
    made.hide("h2", PROJECT / "hvdtrain")
    made.hide("h2", PROJECT / "pyproject.toml")
    look = f"ls {PROJECT}/hvdtrain; cat {PROJECT}/pyproject.toml"
    assert "effnet.py" in ssh(made, "h1", look).stdout
    assert ssh(made, "h2", look).stdout == ""
    assert (PROJECT / "hvdtrain/effnet.py").exists()


# ssh


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Cluster.refuse_ssh, "ssh: connect to host h2 port 22: Connection refused"),
        (Cluster.silence, "ssh: connect to host h2 port 22: Connection timed out"),
    ],
)
def test_ssh_is_refused_for_the_right_reason(cluster: MakeCluster, fault: Callable[..., None], words: str) -> None:
    made = cluster()
    fault(made, "h2")
    refused = ssh(made, "h2", "true")
    assert (refused.returncode, words in refused.stderr) == (255, True), refused.stderr
    assert ssh(made, "h1", "true").returncode == 0


@pytest.mark.parametrize(("sender", "listener"), [("h1", "h2"), ("h2", "h1")])
def test_a_silent_link_carries_nothing_either_way(cluster: MakeCluster, sender: str, listener: str) -> None:
    made = cluster()
    made.silence("h2")
    listen = (
        "import socket as s; u = s.socket(s.AF_INET, s.SOCK_DGRAM); u.bind(('', 9)); u.settimeout(1); print(u.recv(9))"
    )
    hears = made.start(listener, [sys.executable, "-c", listen], stderr=subprocess.DEVNULL)
    assert (
        made.run(sender, ["timeout", "0.5", "bash", "-c", f"echo > /dev/tcp/{made.address(listener)}/22"]).returncode
        == 124
    )
    send = f"while sleep 0.1; do echo x > /dev/udp/{made.address(listener)}/9; done"
    made.start(sender, ["bash", "-c", send], stderr=subprocess.DEVNULL)
    assert hears.wait(END_S) == 1


def test_ssh_that_nobody_told_to_be_strict_asks(cluster: MakeCluster) -> None:
    made = cluster()
    made.prompt_for_password("h2")
    screen = made.folder / "screen.txt"
    screen.touch()
    asked = made.start("outside", ["script", "-qefc", "ssh h2 true", screen], stdout=subprocess.DEVNULL)
    wait_for(lambda: "root@h2's password:" in screen.read_text())
    assert asked.poll() is None


def test_an_unknown_host_has_no_address(cluster: MakeCluster) -> None:
    answer = ssh(cluster(), "h9", "true")
    assert "Could not resolve hostname h9: Name or service not known" in answer.stderr


# mpirun


@pytest.mark.parametrize("start", ["outside", "h1"])
def test_mpirun_runs_between_hosts(cluster: MakeCluster, tmp_path: Path, start: str) -> None:
    made = cluster(hosts=3)
    done = made.run(start, mpirun("h1:2,h2:1,h3:1", 4, tmp_path), env=AS_ROOT)
    assert done.returncode == 0, done.stderr
    assert ranks_in(tmp_path) == [(0, 0, "h1"), (1, 1, "h1"), (2, 0, "h2"), (3, 0, "h3")]
    wait_for(lambda: not any(made.processes(host) for host in made.names))  # the daemons end just after mpirun


# The end


def test_nothing_is_left_of_clusters_that_lived_at_once(tmp_path: Path) -> None:
    before = machine()
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with Cluster(folders[0]) as one, Cluster(folders[1]) as other:
        assert ssh(one, "h1", "hostname").stdout == ssh(other, "h1", "hostname").stdout == "h1\n"
        one.start("h1", ["sleep", "1000"])
        one.mute_sshd("h1")
        other.kill("h2")
        other.hide("h1", PROJECT)
        assert machine() == before
        assert len(living_in(tmp_path)) > 10
    assert living_in(tmp_path) == []
    assert machine() == before


def test_nothing_is_left_of_a_cluster_that_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "boot_script", lambda host, _: "false" if host.name == "h2" else "true")
    with pytest.raises(RuntimeError, match="no namespaces"), Cluster(tmp_path):
        pass
    assert living_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_a_signal_ends_the_test_process(tmp_path: Path, number: int) -> None:
    before = machine()
    program = """
import sys, time, pathlib
from tests.cluster.hosts import Cluster
with Cluster(pathlib.Path(sys.argv[1])) as cluster:
    cluster.start("h1", ["sleep", "1000"])
    cluster.mute_sshd("h2")
    print("made", flush=True)
    time.sleep(1000)
"""
    words = [sys.executable, "-c", program, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=PROJECT, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == "made\n"
        assert len(living_in(tmp_path)) > 10
        test.send_signal(number)
    wait_for(lambda: not living_in(tmp_path))
    assert machine() == before


def test_a_machine_without_what_it_takes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert namespaces.why_not() is None
    monkeypatch.setattr(namespaces, "SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert namespaces.why_not() == f"not installed: {', '.join(namespaces.TOOLS)}"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.why_not() == "network namespaces need root"
