"""A secret that goes to the ranks of several hosts shows in nobody's list of processes, and in no file."""

import secrets as random
from pathlib import Path

from tests.cluster.hosts import PROJECT
from tests.cluster.test_launch import ENV, HVDLAUNCH, TRAIN, nothing_left
from tests.mpi.secrets import NAMES, on_command_lines, open_to_others, told, watched

GIVEN = "WANDB_API_KEY"  # the ranks' own


def test_a_secret_reaches_the_ranks_and_nobody_else(cluster, tmp_path):
    """By horovodrun, which starts mpirun."""
    hosts, secret = cluster(), f"canary-{random.token_hex(8)}"
    options = ("--launcher", "horovodrun", "-x", GIVEN)
    env = {**ENV, "PYTHONPATH": str(PROJECT), **dict.fromkeys(NAMES, secret)}

    def got() -> set[str]:
        """Hosts with a process that has been given the secret."""
        wanted = f"{GIVEN}={secret}".encode()
        return {host for host in ("h1", "h2") for one in hosts.processes(host) if wanted in _environment(one.pid)}

    with (tmp_path / "said").open("w") as said:
        train = [*TRAIN, "--run", "r", "--checkpoint-every", "4steps"]
        argv = [HVDLAUNCH, "run", "-np", "2", "-H", "h1:1,h2:1", *options, "--", *train]
        job = hosts.start("outside", argv, env=env, cwd=tmp_path, stdout=said, stderr=said)
    told_by, given, wrote = watched(
        lambda: job.poll() is None,
        lambda: on_command_lines(secret),
        got,
        lambda: {name for host in ("h1", "h2", "outside") for name in told(secret, hosts.home(host).parent / "tmp")},
    )
    assert job.returncode == 0, (tmp_path / "said").read_text()
    assert told_by == set()
    assert given == {"h1", "h2"}
    assert wrote == set()
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=5)
    assert told(secret, tmp_path) == []
    assert open_to_others(tmp_path / "runs") == []


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
