"""hvdlaunch over hosts that share no network: one address each, or a network each behind a router."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import PROJECT, Cluster
from tests.cluster.test_launch import forked, hvdlaunch, nothing_left, one_line

RANKS = Path(__file__).parent / "programs/ranks.py"
DDP = PROJECT / "tests/mpi/programs/ddp.py"
MakeCluster = Callable[..., Cluster]


def notes(folder: Path) -> list[dict[str, str]]:
    """What the ranks have written, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@pytest.mark.parametrize(("launcher", "start", "routed"), [("mpirun", "outside", 24), ("horovodrun", "h1", 32)])
def test_ranks_meet_through_routers(
    cluster: MakeCluster, tmp_path: Path, *, routed: int, start: str, launcher: str
) -> None:
    """The login node is outside the network that covers the hosts, 10.73.0.0/22."""
    hosts = cluster(hosts=3, routed=routed)
    program = ("--", "python", str(RANKS), str(tmp_path), "--seconds", "0.2")
    done, _ = hvdlaunch(hosts, start, tmp_path, "h1:2,h2:1", *program, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert [(note["rank"], note["host"]) for note in notes(tmp_path)] == [(0, "h1"), (1, "h1"), (2, "h2")]
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=5)


def test_an_interface_inside_the_network_that_covers_them_is_named_and_an_interface_of_all_helps(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    hosts = cluster(hosts=4, routed=32)
    assert hosts.nic("h1") == hosts.nic("h4") == "eth0"
    for words in (
        "link add cni0 type veth peer name pod0",
        "address add 10.73.6.1/24 dev cni0",
        "link set cni0 up",
        "link set pod0 up",
    ):
        assert hosts.run("h1", ["ip", *words.split()]).returncode == 0
    program = ("--", "python", str(RANKS), str(tmp_path))
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h4:1", *program)
    assert done.returncode == 2
    assert "10.73.0.0/21, covers cni0 10.73.6.1/24 of h1 too" in one_line(done.stderr)
    assert notes(tmp_path) == []
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h4:1", "--network", "eth0", *program)
    assert done.returncode == 0, done.stderr
    assert [note["host"] for note in notes(tmp_path)] == ["h1", "h4"]


def test_a_script_for_torchrun_runs_over_two_hosts(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(routed=32)
    env, asked = forked(tmp_path)
    words = (*asked, "--", "python", str(DDP), str(tmp_path))
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h2:1,h1:2", *words, env=env)
    assert done.returncode == 0, done.stderr
    found = notes(tmp_path)
    assert [note["gradient"] for note in found] == [[2.0] * 4] * 3  # the mean of all
    assert {note["MASTER_ADDR"] for note in found} == {hosts.address("h2")}
    assert [(note["LOCAL_RANK"], note["LOCAL_WORLD_SIZE"]) for note in found] == [("0", "1"), ("0", "2"), ("1", "2")]
