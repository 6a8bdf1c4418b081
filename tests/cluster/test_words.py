"""Ranks on hosts that share no folder: each host keeps its logs, and the last words of a failed rank are fetched."""

from pathlib import Path

from tests.cluster.test_launch import MakeCluster, hvdlaunch, nothing_left

HERE = Path("/tmp/here")  # noqa: S108 (each host has its own)


def test_each_host_keeps_its_logs_and_a_failed_rank_is_quoted(cluster: MakeCluster) -> None:
    hosts = cluster()
    for name in ("outside", "h1", "h2"):
        assert hosts.run(name, ["mkdir", HERE]).returncode == 0
    program = "echo I am $OMPI_COMM_WORLD_RANK; [ $OMPI_COMM_WORLD_RANK = 2 ] && exit 3; sleep 100"
    done, _ = hvdlaunch(hosts, "outside", HERE, "h1:2,h2:1", "--", "sh", "-c", program)
    assert (done.returncode, done.stdout) == (3, "I am 0\n"), done.stderr
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=2)
    kept = {name: hosts.run(name, ["sh", "-c", f"cat {HERE}/logs/*/rank-*"]).stdout for name in ("outside", "h1", "h2")}
    assert kept == {"outside": "", "h1": "I am 0\nI am 1\n", "h2": "I am 2\n"}
    file = hosts.run("h2", ["sh", "-c", f"ls {HERE}/logs/*/rank-2.log"]).stdout.strip()
    assert done.stderr.splitlines()[-3:] == [
        "hvdlaunch: error: rank 2 on h2 ended with status 3; its last words:",
        "    I am 2",
        f"    {file}",
    ]
