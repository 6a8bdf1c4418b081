"""hvdlaunch in an allocation of a real Slurm on several hosts without sshd: srun asks them and starts the ranks."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import OUTSIDE, Cluster
from tests.cluster.namespaces import tool
from tests.cluster.test_launch import ENV, HVDLAUNCH, NOTE, TRAIN, notes, one_line
from tests.mpi.conftest import wait_until
from tests.mpi.test_slurm import ANYWHERE

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "salloc")
MISSING = [program for program in NEEDED if tool(program) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

CONF = """\
ClusterName=test
SlurmctldHost=h1({addresses[h1]})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
{nodes}
"""


class Slurm:
    """A controller on h1 and a node on every host, without ssh."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        addresses = {name: cluster.address(name) for name in cluster.names}
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=2 State=UNKNOWN"
            for name, address in addresses.items()
        )
        conf, key = folder / "slurm.conf", folder / "key"
        (folder / "state").mkdir()
        conf.write_text(CONF.format(folder=folder, addresses=addresses, nodes=nodes) + ANYWHERE)
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.env = {**ENV, "SLURM_CONF": str(conf)}
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
        munged += [f"--{name}=/run/munge.{file}" for name, file in files.items()]
        for name in (*cluster.names, OUTSIDE):
            cluster.refuse_ssh(name)
            self._start(name, *munged)
        wait_until(lambda: all(map(self._has_munge, (*cluster.names, OUTSIDE))), 30)
        self._start("h1", "slurmctld", "-D")
        wait_until(lambda: self.run("h1", "scontrol", "ping").returncode == 0, 30)
        for name in cluster.names:
            self._start(name, "slurmd", "-D")
        wait_until(lambda: set(self.run("h1", "sinfo", "-hN", "-o%T").stdout.split()) == {"idle"}, 30)

    def _start(self, host: str, *argv: str) -> None:
        with (self.folder / f"{argv[0]}-{host}.out").open("w") as out:
            self.cluster.start(host, argv, env=self.env, stdout=out, stderr=out)

    def _has_munge(self, host: str) -> bool:
        return self.run(host, "munge", "--no-input", "--socket=/run/munge.socket").returncode == 0

    def run(self, host: str, *argv: str, cwd: Path | None = None):
        return self.cluster.run(host, argv, env=self.env, cwd=cwd, timeout_s=120)

    def hvdlaunch(self, *words: str | Path, nodes: int = 2, start: str = "h1"):
        """In an allocation with a slot on each node; salloc runs it where it runs itself."""
        command = [HVDLAUNCH, "run", *words]
        return self.run(
            start, "salloc", "--quiet", f"--nodes={nodes}", f"--ntasks={nodes}", *map(str, command), cwd=self.folder
        )


@pytest.fixture
def slurm(cluster: Callable[..., Cluster], tmp_path: Path) -> Callable[..., Slurm]:
    def make(hosts: int = 2) -> Slurm:
        folder = tmp_path / "slurm"
        folder.mkdir()
        return Slurm(cluster(hosts=hosts), folder)

    return make


def test_srun_asks_the_nodes_and_starts_the_ranks_where_ssh_is_not(slurm: Callable[..., Slurm]) -> None:
    """From a login node, where salloc runs its command."""
    three = slurm(hosts=3)
    done = three.hvdlaunch("-np", "3", "--", "python", NOTE, three.folder, nodes=3, start=OUTSIDE)
    assert done.returncode == 0, done.stderr
    found = notes(three.folder)
    assert [(note["host"], note["local_rank"]) for note in found] == [("h1", 0), ("h2", 0), ("h3", 0)]
    interfaces = [note["environment"]["NCCL_SOCKET_IFNAME"] for note in found]
    assert interfaces == [three.cluster.nic(note["host"]) for note in found]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_ranks_on_several_nodes_train_together_and_nothing_is_left(slurm: Callable[..., Slurm], launcher: str) -> None:
    two = slurm()
    if launcher == "srun" and (step := two.run("h1", "srun", "--mpi=pmix", "true")).returncode:
        pytest.skip(f"this Slurm has no PMIx: {step.stderr}")
    done = two.hvdlaunch("-np", "2", "--launcher", launcher, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    (result,) = two.folder.glob("runs/effnet/*/result.json")
    assert json.loads(result.read_text())["exit_reason"] == "finished"
    left = {host: [" ".join(one.argv) for one in two.cluster.processes(host)] for host in two.cluster.names}
    assert {line for lines in left.values() for line in lines if "slurm" not in line and "munge" not in line} == set()


def test_a_node_of_others_is_named(slurm: Callable[..., Slurm]) -> None:
    done = slurm().hvdlaunch("-np", "2", "-H", "h1:1,h3:1", "--", "true")
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("hvdlaunch: error: host h3: it is not a node of this Slurm allocation")
