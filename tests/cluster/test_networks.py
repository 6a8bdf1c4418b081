"""hvdlaunch over hosts that share no network or several: one address each, a router, networks that lead nowhere."""

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import PROJECT, Cluster
from tests.cluster.test_launch import ENV, HVDLAUNCH, MakeCluster, hvdlaunch, notes, nothing_left, one_line

RANKS = Path(__file__).parent / "programs/ranks.py"
DDP = PROJECT / "tests/mpi/programs/ddp.py"


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
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h2:1,h1:2", "--", "python", str(DDP), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = notes(tmp_path)
    assert [note["gradient"] for note in found] == [[2.0] * 4] * 3  # the mean of all
    assert {note["MASTER_ADDR"] for note in found} == {hosts.address("h2")}
    assert [(note["LOCAL_RANK"], note["LOCAL_WORLD_SIZE"]) for note in found] == [("0", "1"), ("0", "2"), ("1", "2")]


def lead_nowhere(hosts: Cluster, folder: Path, *names: str) -> None:
    """Give h1 and h2 unlike addresses in one subnet on each of these interfaces, faster than the cable between them."""
    (slow := folder / "speed").write_text("1000\n")
    for host in ("h1", "h2"):
        script = [f"mount --bind {slow} /sys/class/net/{hosts.nic(host)}/speed"]
        for number, name in enumerate(names):
            script += [
                f"ip link add {name} type veth peer name far{number}",
                f"ip address add 192.168.{number}.{host[1]}/24 dev {name}",
                f"ip link set {name} up",
                f"ip link set far{number} up",
            ]
        assert hosts.run(host, ["sh", "-ec", "\n".join(script)]).returncode == 0


@pytest.mark.parametrize(("launcher", "start"), [("mpirun", "h1"), ("horovodrun", "outside")])
def test_a_faster_network_that_leads_nowhere_is_dropped(
    cluster: MakeCluster, tmp_path: Path, *, launcher: str, start: str
) -> None:
    hosts = cluster()
    lead_nowhere(hosts, tmp_path, "ens9", "podman0")
    program = ("--", "python", str(RANKS), str(tmp_path))
    done, _ = hvdlaunch(hosts, start, tmp_path, "h1:1,h2:1", *program, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert [note["host"] for note in notes(tmp_path)] == ["h1", "h2"]
    (line,) = [line for line in done.stderr.splitlines() if "networks tried" in line]
    assert "192.168.0.0/24 dropped (h1 to h2: no answer), 10.73.0.0/24 works, 192.168.1.0/24 dropped" in line


def test_check_names_the_networks_and_refuses_hosts_that_do_not_connect(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    lead_nowhere(hosts, tmp_path, "ens9")
    argv = [HVDLAUNCH, "check", "-H", "h1:1,h2:1", "--gpus", "none", "--json"]
    document = json.loads(hosts.run("outside", argv, env=ENV, cwd=tmp_path).stdout)
    assert document["network"] == hosts.subnet
    assert document["networks_tried"] == {"192.168.0.0/24": "h1 to h2: no answer", hosts.subnet: ""}
    only_ssh = f"iptables -A INPUT -i {hosts.nic('h2')} -p tcp --syn ! --dport 22 -j DROP"
    assert hosts.run("h2", ["sh", "-c", only_ssh]).returncode == 0
    done = hosts.run("outside", argv, env=ENV, cwd=tmp_path)
    problem = next(one for one in json.loads(done.stdout)["findings"] if one["about"] == "network")
    assert (done.returncode, problem["severity"]) == (1, "error")
    assert "10.73.0.0/24 dropped (h1 to h2: no answer)" in problem["problem"]
    assert problem["remedy"].startswith("allow TCP between them, or name a network")
