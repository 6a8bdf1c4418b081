"""hvdlaunch check over hosts with several faults at once, and its quick form before a run."""

import json
import sys
from pathlib import Path

from tests.cluster.hosts import PROJECT, Cluster
from tests.cluster.test_launch import ENV, HVDLAUNCH, MakeCluster, hvdlaunch, one_line


def check(hosts: Cluster, folder: Path, listed: str, *words: str):
    options = ["check", "-H", listed, "--gpus", "none", *words]
    return hosts.run("outside", [HVDLAUNCH, *options], env=ENV, cwd=folder, timeout_s=60)


def set_mtu(hosts: Cluster, host: str, mtu: int) -> None:
    assert hosts.run(host, ["ip", "link", "set", "dev", hosts.nic(host), "mtu", str(mtu)]).returncode == 0


def test_all_faults_of_all_hosts_are_named_at_once(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster(hosts=4)
    (folder := tmp_path / "shared").mkdir()
    done = check(hosts, folder, "h1:1,h2:1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    set_mtu(hosts, "h2", 1400)
    hosts.hide("h2", folder)
    hosts.hide("h2", PROJECT / "hvdtrain" / "__init__.py")
    hosts.put_on_path("h2", "git", f"#!/bin/sh\necho {'f' * 40}\n")
    (hosts.home("h2") / ".nccl.conf").write_text("NCCL_IB_DISABLE=1\n")
    hosts.forget_host_key("h3")
    hosts.kill("h4")
    done = check(hosts, folder, "h1:1,h2:1,h3:1,h4:1", "--json")
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    document = json.loads(done.stdout)
    found = {
        (one["severity"], *one["hosts"], one["about"]): f"{one['problem']}: {one['remedy']}"
        for one in document["findings"]
    }
    assert {key for key in found if key[-1] != "free disk"} == {
        ("error", "h3", "reached"),
        ("error", "h4", "reached"),
        ("error", "h2", "project"),
        ("warning", "h2", "MTU"),
        ("warning", "h2", "shared folder"),
        ("warning", "h2", "NCCL_IB_DISABLE"),
    }
    assert "its host key is unknown (Host key verification failed.): Run `ssh h3`" in found["error", "h3", "reached"]
    assert "no route to h4" in found["error", "h4", "reached"]
    assert "commit fffffffff" in found["error", "h2", "project"]
    assert f"the MTU of {hosts.nic('h2')} is 1400, on h1 1500" in found["warning", "h2", "MTU"]
    assert [host for host, facts in document["hosts"].items() if facts is None] == ["h3", "h4"]
    assert document["network"] == hosts.subnet
    assert list(folder.iterdir()) == []
    assert not any(hosts.processes(host) for host in ("h1", "h2", "h3", "outside"))


def test_a_host_on_which_mpirun_cannot_start_its_daemon_is_found(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    hosts.hide("h2", Path(sys.prefix, "bin/orted"))
    done = check(hosts, tmp_path, "h1:1,h2:1")
    assert done.returncode == 1, done.stdout
    assert "error: h1, h2: " in done.stdout
    assert "does not start there" in done.stdout


def test_a_run_on_hosts_that_differ_ends_before_it_starts_unless_nobody_is_to_look(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    hosts = cluster()
    set_mtu(hosts, "h2", 1400)
    program = ("--", "touch", str(tmp_path / "started"))
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h2:1", *program)
    assert done.returncode == 0, done.stderr
    assert one_line(done.stderr).startswith(f"hvdlaunch: warning: h2: the MTU of {hosts.nic('h2')} is 1400, on h1 1500")
    (tmp_path / "started").unlink()
    hosts.hide("h2", PROJECT / "hvdtrain" / "__init__.py")
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h2:1", *program)
    assert done.returncode == 2
    assert one_line(done.stderr) == (
        "hvdlaunch: error: this run would fail because of h2: fix what follows, or pass --no-check to start anyway"
    )
    below = [line.split(": ")[:2] for line in done.stderr.splitlines() if line.startswith("    ")]
    assert below == [["    error", "h2"], ["    warning", "h2"]]
    assert not (tmp_path / "started").exists()
    done, _ = hvdlaunch(hosts, "outside", tmp_path, "h1:1,h2:1", "--no-check", *program)
    assert (done.returncode, (tmp_path / "started").exists()) == (0, True), done.stderr
    assert "MTU" not in done.stderr
