"""hvdlaunch over several hosts: who runs where, one clear line for each fault, and nothing left on any host."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launch.probe.ssh import SILENCE_S
from tests.cluster.hosts import Cluster
from tests.mpi import forks
from tests.mpi.conftest import EFFNET

BIN = Path(sys.prefix) / "bin"
HVDLAUNCH = BIN / "hvdlaunch"
ENV = {"PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}
NOTE = Path(__file__).parent / "programs" / "note.py"
TRAIN = (
    *("python", "-m", "hvdtrain.effnet", "--data", "digits", "--model", "efficientnet_tiny"),
    *(
        "--epochs",
        "1",
        "--batch-size-per-rank",
        "64",
        "--ema-epochs",
        "0",
        "--reducer",
        "horovod",
        "--deterministic",
    ),
)
MakeCluster = Callable[..., Cluster]
LONG = [pytest.mark.slow, pytest.mark.long]


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
    options = ["run", "-np", str(ranks), "-H", hosts, "--launcher", launcher, "--allow-run-as-root"]
    began = time.monotonic()
    done = cluster.run(start, [HVDLAUNCH, *options, *words], env=env, cwd=folder, timeout_s=200)
    return done, time.monotonic() - began


def forked(folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment and the words of hvdlaunch with which ranks import nothing: they are forks."""
    return {**ENV, **forks.on_hosts(folder)}, ("-x", "TESTS_FORKSERVER", "-x", "OMP_NUM_THREADS")


def one_line(text: str) -> str:
    """The only line that is not the remark about CPUs, and not indented below it."""
    lines = [line for line in text.splitlines() if line[:1] != " " and "running on CPU" not in line]
    assert len(lines) == 1, text
    return lines[0]


def nothing_left(cluster: Cluster, hosts: tuple[str, ...], within_s: float) -> None:
    end = time.monotonic() + within_s
    while any(cluster.processes(host) for host in hosts):
        assert time.monotonic() < end, {host: cluster.processes(host) for host in hosts}
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("launcher", "start", "hosts"),
    [
        ("mpirun", "h1", "h1:2,h2:1"),
        ("mpirun", "h3", "h2:1,h1:2,h3:1"),
        ("horovodrun", "h3", "h2:1,h1:2,h3:1"),
        ("horovodrun", "outside", "h1:2,h2:2,h3:2"),
    ],
)
def test_every_rank_is_where_it_was_planned(
    cluster: MakeCluster, tmp_path: Path, *, launcher: str, start: str, hosts: str
) -> None:
    """Also where the list does not begin with the host that mpirun starts on, which it counts first."""
    hosts_there = cluster(hosts=3)
    program = ("--", "python", str(NOTE), str(tmp_path))
    done, _ = hvdlaunch(hosts_there, start, tmp_path, hosts, *program, launcher=launcher)
    assert done.returncode == 0, done.stderr
    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    order = sorted((one.split(":") for one in hosts.split(",")), key=lambda one: one[0] != start)
    planned = [(host, local) for host, slots in order for local in range(int(slots))]
    assert [(note["host"], note["local_rank"]) for note in notes] == planned
    assert [note["rank"] for note in notes] == list(range(len(planned)))
    for note in notes:
        assert note["plan"]["ranks"][note["rank"]]["host"] == note["host"]
        assert note["NCCL_SOCKET_IFNAME"] == hosts_there.nic(note["host"])  # each host calls it otherwise
        assert note["CUDA_VISIBLE_DEVICES"] == ""
        assert note["folder"] == str(tmp_path)


def test_the_same_weights_on_one_host_and_on_two(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=2)
    env, asked = forked(tmp_path)
    weights = {}
    for run, start, where, launcher in (
        ("one", "h1", "h1:3", "mpirun"),
        ("two", "outside", "h1:2,h2:1", "mpirun"),
        ("horovodrun", "h1", "h2:1,h1:2", "horovodrun"),
    ):
        two_steps = ("--batch-size-per-rank", "240")  # of many sums each
        words = (*asked, "--", "python", *EFFNET, *TRAIN[3:], *two_steps, "--run", run)
        done, _ = hvdlaunch(hosts, start, tmp_path, where, *words, launcher=launcher, env=env)
        assert done.returncode == 0, done.stderr
        ranks = [json.loads((tmp_path / f"runs/effnet/{run}/ranks/rank-{rank}.json").read_text()) for rank in range(3)]
        weights[run] = {rank["weights_sha256"] for rank in ranks}
        placement = json.loads((tmp_path / f"runs/effnet/{run}/placement.json").read_text())
        places = [(slot["hostname"], slot["local_rank"]) for slot in placement["plan"]["ranks"]]
        assert [(rank["host"], rank["local_rank"]) for rank in ranks] == places
    assert len(weights["one"]) == 1
    assert weights["one"] == weights["two"] == weights["horovodrun"]


def test_horovod_counts_ranks_and_hosts_as_planned(cluster: MakeCluster, tmp_path: Path) -> None:
    program = (
        "import json, pathlib, mpi4py.MPI, horovod.torch as hvd; hvd.init(); "
        "pathlib.Path(f'rank-{hvd.rank()}.json').write_text(json.dumps("
        "[hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]))"
    )
    done, _ = hvdlaunch(cluster(), "outside", tmp_path, "h1:2,h2:1", "--", "python", "-c", program)
    assert done.returncode == 0, done.stderr
    counted = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert counted == [[0, 2, 0, 2], [1, 2, 0, 1], [0, 1, 1, 2]]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda cluster: cluster.refuse_ssh("h2"), "connection refused"),
        (lambda cluster: cluster.change_host_key("h2"), "its host key has changed"),
        (lambda cluster: cluster.forget_host_key("h2"), "its host key is unknown"),
        (lambda cluster: cluster.prompt_for_password("h2"), "ssh asks for a password"),
        (lambda cluster: cluster.mute_sshd("h2"), "ssh to h2 timed out"),
        (lambda cluster: cluster.silence("h2"), "ssh to h2 timed out"),
        (lambda cluster: cluster.kill("h2"), "no route to h2"),
        (lambda cluster: cluster.hide("h2", Path(__file__).parents[2] / "launch"), "cannot import hvdlaunch"),
        (lambda cluster: cluster.hide("h2", BIN / "mpirun"), "mpirun is missing, here it is Open MPI"),
        (lambda cluster: cluster.hide("h2", BIN), " does not exist"),
        (lambda cluster: cluster.hide("h2", Path(__file__).parents[2] / "launch/hosts/slurm.py"), "it has version "),
    ],
    ids=[
        "refused",
        "changed-key",
        "unknown-key",
        "prompts",
        "mute",
        "silent",
        "dead",
        "no-project",
        "no-mpi",
        "no-python",
        "other-version",
    ],
)
def test_a_host_that_cannot_take_part_is_named_before_anything_starts(
    cluster: MakeCluster, tmp_path: Path, fault: Callable[[Cluster], None], says: str
) -> None:
    hosts = cluster()
    fault(hosts)
    words = ("--", "touch", str(tmp_path / "started"))
    done, took_s = hvdlaunch(hosts, "outside", tmp_path, "h1:2,h2:1", *words)
    assert done.returncode == 2
    line = one_line(done.stderr)
    assert "host h2" in line, line
    assert says in line, line
    assert took_s < 15
    assert not (tmp_path / "started").exists()
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=2)


def test_visible_gpus_of_one_host_are_not_those_of_all(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=2)
    (tmp_path / "topo").write_text("\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\tX\n")
    shown = shlex.quote(str(tmp_path / "topo"))
    for name in ("h2", "h1"):
        smi = hosts.put_on_path(name, "nvidia-smi", f'#!/bin/sh\n[ "$1" = topo ] && exec cat {shown}\nexit 1\n')
    own = {"PATH": f"{smi.parent}:{ENV['PATH']}", "CUDA_VISIBLE_DEVICES": "1"}
    words = [HVDLAUNCH, "plan", "-H", "h1,h2", "--", "true"]  # as root, and a rank for each GPU
    done = hosts.run("h1", words, env={**ENV, **own}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[1:4] for line in done.stdout.splitlines()[2:5]]  # below the remark on nvidia-smi
    assert rows == [["h1", "0", "1"], ["h2", "0", "0"], ["h2", "1", "1"]]


def test_an_unknown_host_name(cluster: MakeCluster, tmp_path: Path) -> None:
    done, _ = hvdlaunch(cluster(), "outside", tmp_path, "h1:2,h9:1", "--", "true")
    assert done.returncode == 2
    assert "host h9: unknown host name" in one_line(done.stderr)


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_another_mpi_first_on_a_hosts_path_does_not_start(cluster: MakeCluster, tmp_path: Path, launcher: str) -> None:
    hosts = cluster()
    for name in ("mpirun", "orted"):
        hosts.put_on_path("h2", name, f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path))}/wrong\nexit 1\n")
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:2,h2:1", "--", "true", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "wrong").exists()


def test_the_first_failing_rank_is_named_with_its_host(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    program = ("sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 2 ] && exit 3; sleep 100")
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:2,h2:1", "--", *program)
    assert done.returncode == 3
    assert one_line(done.stderr) == "hvdlaunch: error: rank 2 on h2 ended with status 3"
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=2)


@pytest.mark.parametrize(
    ("launcher", "start", "fault", "limit_s"),
    [
        ("mpirun", "outside", "kill", 5),
        ("horovodrun", "h1", "kill", 5),
        ("mpirun", "h1", "silence", 15),
        ("horovodrun", "outside", "silence", 15),
    ],
)
def test_a_host_that_is_lost_ends_the_run_and_is_named(
    cluster: MakeCluster, tmp_path: Path, *, fault: str, limit_s: float, start: str, launcher: str
) -> None:
    hosts = cluster()
    program = f"touch {shlex.quote(str(tmp_path))}/$OMPI_COMM_WORLD_RANK; exec sleep 100"
    options = ["run", "-np", "3", "-H", "h1:2,h2:1", "--launcher", launcher, "--allow-run-as-root", "--silence-s", "4"]
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        argv = [HVDLAUNCH, *options, "--", "sh", "-c", program]
        started = hosts.start(start, argv, env=ENV, cwd=tmp_path, stderr=stderr)
        end = time.monotonic() + 30
        while not all((tmp_path / str(rank)).exists() for rank in range(3)):
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.05)
        getattr(hosts, fault)("h2")
        began = time.monotonic()
        assert started.wait(60) not in (0, 2)
    assert time.monotonic() - began < limit_s
    assert one_line(errors.read_text()) == "hvdlaunch: error: host h2 no longer answers; it had rank 2"
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=limit_s)


@pytest.mark.parametrize(
    ("silence_s", "silent_s"), [(10, 6), (10, None), *(pytest.param(30, of, marks=LONG) for of in (25, None))]
)
def test_a_silence_that_ends_in_time_ends_no_run(
    cluster: MakeCluster, tmp_path: Path, silence_s: int, silent_s: float | None
) -> None:
    """A link may lose every packet for less than --silence-s, 30 by default; one that stays silent ends the run."""
    hosts = cluster()
    program = f"touch {shlex.quote(str(tmp_path))}/$OMPI_COMM_WORLD_RANK; exec sleep {2 * silence_s}"
    options = ["run", "-np", "2", "-H", "h1:1,h2:1", "--allow-run-as-root"]
    options += [] if silence_s == SILENCE_S else ["--silence-s", str(silence_s)]
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        started = hosts.start(
            "outside", [HVDLAUNCH, *options, "--", "sh", "-c", program], env=ENV, cwd=tmp_path, stderr=stderr
        )
        end = time.monotonic() + 30
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.05)
        hosts.silence("h2")
        began = time.monotonic()
        if silent_s is not None:
            time.sleep(silent_s)
            hosts.run("h2", ["iptables", "-F"])
        status = started.wait(4 * silence_s)
    if silent_s is not None:
        assert status == 0, errors.read_text()
        return
    assert status not in (0, 2)
    assert silence_s <= time.monotonic() - began < 2 * silence_s
    assert one_line(errors.read_text()) == "hvdlaunch: error: host h2 no longer answers; it had rank 1"


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_the_user_may_be_less_strict_about_host_keys(cluster: MakeCluster, tmp_path: Path, launcher: str) -> None:
    hosts = cluster()
    hosts.forget_host_key("h2")
    accept = ("--ssh-option", "StrictHostKeyChecking=accept-new", "--", "touch", str(tmp_path / "started"))
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h2:1", *accept, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").exists()


def test_the_users_program_in_place_of_ssh_reaches_the_hosts(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    agent = hosts.put_on_path("outside", "enter", f'#!/bin/sh\necho "$1" >> {tmp_path}/entered\nexec ssh "$@"\n')
    program = ("--allow-run-as-root", "--", "touch", str(tmp_path / "started"))
    done = hosts.run(
        "outside",
        [HVDLAUNCH, "run", "-H", "h1,h2", "--per-host", "1", *program],
        env={**ENV, "OMPI_MCA_plm_rsh_agent": str(agent)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    entered = (tmp_path / "entered").read_text().split()
    assert sorted(set(entered)) == ["h1", "h2"]
    assert len(entered) == 4  # asked, and entered by mpirun


def test_all_hosts_that_refuse_are_named_at_once_with_what_ssh_said(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=3)
    hosts.prompt_for_password("h1")
    hosts.forget_host_key("h3")
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h2:1,h3:1", "--", "true")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "hvdlaunch: error: 2 of 3 hosts cannot be used: h1, h3: fix them, or leave them out",
        "    host h1: ssh asks for a password. Copy your key: `ssh-copy-id h1`",
        "        root@h1: Permission denied (password).",
        "    host h3: its host key is unknown. Run `ssh h3` once to accept it.",
        "        No ED25519 host key is known for h3 and you have requested strict checking.",
        "        Host key verification failed.",
    ]


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_no_rank_survives_hvdlaunch_on_any_host(cluster: MakeCluster, tmp_path: Path, launcher: str) -> None:
    hosts = cluster()
    program = f"touch {shlex.quote(str(tmp_path))}/$OMPI_COMM_WORLD_RANK; exec sleep 100"
    argv = [HVDLAUNCH, "run", "-np", "3", "-H", "h1:2,h2:1", "--launcher", launcher, "--allow-run-as-root", "--"]
    started = hosts.start("outside", [*argv, "sh", "-c", program], env=ENV, cwd=tmp_path)
    end = time.monotonic() + 30
    while not all((tmp_path / str(rank)).exists() for rank in range(3)):
        assert time.monotonic() < end
        time.sleep(0.05)
    started.kill()  # not the keeper that it has forked, which looks the same
    started.wait(10)
    end = time.monotonic() + 5
    while any("sleep" in words for host in ("h1", "h2") for _, words in hosts.processes(host)):
        assert time.monotonic() < end, {host: hosts.processes(host) for host in ("h1", "h2")}
        time.sleep(0.05)
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=20)  # mpirun's daemons take longer than the ranks
