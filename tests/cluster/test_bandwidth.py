"""hvdlaunch check --bandwidth over shaped networks names the slow host and the fastest way to sum."""

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.namespaces import tool
from tests.cluster.test_launch import ENV, HVDLAUNCH, MakeCluster, nothing_left

SHOW = "import os; print(os.environ.get('OMPI_MCA_coll_tuned_allreduce_algorithm', 'None'))"
pytestmark = pytest.mark.skipif(tool("tc") is None, reason="no tc")


def shape(cluster: Cluster, host: str, rate: str) -> None:
    """What the host sends goes at this rate."""
    words = f"qdisc add dev {cluster.nic(host)} root tbf rate {rate} burst 16kb latency 200ms".split()
    done = cluster.run(host, [tool("tc") or "tc", *words])
    assert done.returncode == 0, done.stderr


def check(cluster: Cluster, folder: Path, hosts: str, *more: str, timeout_s: float = 240):
    words = ["check", "-H", hosts, "--bandwidth", "--json", *more]
    done = cluster.run("outside", [HVDLAUNCH, *words], env=ENV, cwd=folder, timeout_s=timeout_s)
    document = json.loads(done.stdout)
    return document["bandwidth"], [one for one in document["findings"] if one["about"] == "bandwidth"], done


@pytest.mark.slow
@pytest.mark.long  # a minute of slow exchanges; make test has what check makes of their times
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


@pytest.mark.slow
@pytest.mark.long  # three to six minutes, of which it computes one
@pytest.mark.timeout(900)
def test_the_fastest_way_to_sum_is_found_and_a_run_sets_it(cluster: MakeCluster, tmp_path: Path) -> None:
    """Of three ranks Open MPI pairs two first, so that its default sends more than twice what a ring does."""
    hosts = cluster(hosts=3)
    for name in hosts.names:
        shape(hosts, name, "400mbit")
    part = {"exchanges": [], "sums_bytes": 0, "gradient_bytes": 2_000_000}
    (tmp_path / "traffic.json").write_text(json.dumps({"parts": [part]}))
    measured, _, done = check(hosts, tmp_path, "h1:1,h2:1,h3:1", "--measured", "traffic.json", timeout_s=600)
    ways = {way["name"]: way["rounds_s"] for way in measured["sums"]["ways"]}
    assert [len(ways[name]) for name in ("the default", "ring")] == [3, 3], done.stderr
    assert {"--sync two-level", "two-level, MPI's", "recursive doubling"} <= set(ways)
    (tmp_path / "measured.json").write_text(done.stdout)
    for host, algorithm in (("h1:1,h2:1,h3:1", "45"), ("h1:1,h2:1", "N")):
        run = ["run", "-H", host, "--measured", "measured.json", "--", "python", "-c", SHOW]
        done = hosts.run("outside", [HVDLAUNCH, *run], env=ENV, cwd=tmp_path)
        assert done.stdout[0] in algorithm, done.stderr
        assert ("sums of 2 MB go fastest by ring" in done.stderr) == (algorithm == "45")
    nothing_left(hosts, (*hosts.names, "outside"), within_s=5)
