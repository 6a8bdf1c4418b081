"""Texts on several hosts, each with files and a cache of its own."""

import json
from pathlib import Path

import pytest

from tests import texts
from tests.cluster.hosts import TMP, Cluster
from tests.cluster.test_launch import MakeCluster, hvdlaunch

HERE = TMP / "texts"
BERT = ("python", "-m", "hvdtrain.bert", "--data", "json", "--data-dir", str(HERE), "--vocab-size", "200")
QUICK = ("--global-batch-size", "9", "--accumulate-steps", "1", "--max-steps", "2", "--run", "r")


@pytest.fixture
def hosts(cluster: MakeCluster, tmp_path: Path) -> Cluster:
    """Two, each with its copy of the texts in a /tmp that the other does not see."""
    texts.put(tmp_path / "texts")
    made = cluster()
    for host in made.names:
        assert made.run(host, ["cp", "-r", tmp_path / "texts", HERE]).returncode == 0
    return made


def test_hosts_agree_about_the_numbers_that_each_has_made(hosts: Cluster, tmp_path: Path) -> None:
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:2,h2:1", "--", *BERT, *QUICK)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs/bert/r/result.json").read_text())
    assert (result["exit_reason"], result["hosts"], result["np"]) == ("finished", ["h1", "h2"], 3)
    made = [list(hosts.home(host).glob(".cache/hvdtrain/tokens/*/about.json")) for host in hosts.names]
    assert [len(of_host) for of_host in made] == [1, 1]
    first, second = (of_host[0] for of_host in made)
    assert first.parent.name == second.parent.name
    assert first.read_bytes() == second.read_bytes()
    assert not list(hosts.home("outside").glob(".cache/hvdtrain/tokens/*"))
