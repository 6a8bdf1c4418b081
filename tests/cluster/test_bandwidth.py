"""hvdlaunch check --bandwidth over hosts whose networks are shaped: the slow host and the slow pair are named."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.namespaces import tool
from tests.cluster.test_launch import ENV, HVDLAUNCH, nothing_left

MakeCluster = Callable[..., Cluster]
pytestmark = pytest.mark.skipif(tool("tc") is None, reason="no tc")


def shape(cluster: Cluster, host: str, rate: str, toward: Mapping[str, str] | None = None) -> None:
    """What the host sends goes at this rate, what it sends `toward` a host at another."""
    nic = cluster.nic(host)
    lines = [f"qdisc add dev {nic} root tbf rate {rate} burst 16kb latency 200ms"]
    for other, slower in (toward or {}).items():
        lines = [
            f"qdisc add dev {nic} root handle 1: htb default 1",
            f"class add dev {nic} parent 1: classid 1:1 htb rate {rate} burst 16kb",
            f"class add dev {nic} parent 1: classid 1:2 htb rate {slower} burst 16kb",
            f"filter add dev {nic} parent 1: protocol ip u32 match ip dst {cluster.address(other)}/32 flowid 1:2",
        ]
    for line in lines:
        done = cluster.run(host, [tool("tc") or "tc", *line.split()])
        assert done.returncode == 0, done.stderr


def check(cluster: Cluster, folder: Path, hosts: str):
    words = ["check", "-H", hosts, "--bandwidth", "--json", "--allow-run-as-root"]
    done = cluster.run("outside", [HVDLAUNCH, *words], env=ENV, cwd=folder, timeout_s=240)
    document = json.loads(done.stdout)
    return document["bandwidth"], [one for one in document["findings"] if one["about"] == "bandwidth"], done


def test_a_host_with_a_slow_network_is_named(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=3)
    for name, rate in (("h1", "100mbit"), ("h2", "12mbit"), ("h3", "100mbit")):
        shape(hosts, name, rate)
    measured, findings, done = check(hosts, tmp_path, "h1:1,h2:1,h3:1")
    assert [one["hosts"] for one in findings] == [["h2"]], done.stderr
    assert "with every other host" in findings[0]["problem"]
    assert sorted(pair["hosts"] for pair in measured["pairs"]) == [["h1", "h2"], ["h1", "h3"], ["h2", "h3"]]
    assert all(pair["speeds"][0]["bytes"] == 1024 for pair in measured["pairs"])
    assert measured["over_all"]
    nothing_left(hosts, ("h1", "h2", "h3", "outside"), within_s=5)
    assert not list(tmp_path.glob(".hvdlaunch-*"))


def test_a_slow_pair_is_named(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=3)
    shape(hosts, "h1", "100mbit", toward={"h3": "12mbit"})
    for name in ("h2", "h3"):
        shape(hosts, name, "100mbit")
    _, findings, done = check(hosts, tmp_path, "h1:1,h2:1,h3:1")
    assert [(one["hosts"], one["problem"].partition(" it ")[0]) for one in findings] == [(["h1"], "with h3")], (
        done.stderr
    )
