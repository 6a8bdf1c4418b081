"""What is to be started in the tests of commands and environments."""

from dataclasses import replace

from launch.hosts.ssh import SSH
from launch.machine.mpi import Mpi
from launch.placement.slots import place
from launch.run.start.launchers.choose import VERSIONS
from launch.run.start.launchers.horovodrun import Horovodrun
from launch.run.start.launchers.srun import Srun
from launch.run.start.plan import Plan
from launch.run.start.render import render
from tests.unit.machines import hosts, machine, request

OURS = ("HVDLAUNCH_JOB", "HVDLAUNCH_PLAN", "HVDLAUNCH_REPORT", "PATH")
MPI4 = Mpi(path="/opt/openmpi/bin/mpirun", name="Open MPI", version=(4, 1, 8))
MPI5 = replace(MPI4, version=(5, 0, 3))
THREE = hosts(**{"h1": 2, "h2.cluster.example": 1})
TRAIN = ("python", "-m", "hvdtrain.effnet", "--data", "digits")
REQUESTED = ("as_root", "attempt", "ranks_per_replica", "traffic")


def launcher(mpi=MPI4, kind="mpirun", ssh=SSH):
    (version,) = (each for each in VERSIONS if each.version == mpi.version[0])
    shared = {"python": "/opt/venv/bin/python", "mpi": mpi, "ssh": ssh}
    if kind == "horovodrun":
        return Horovodrun(path="/opt/venv/bin/horovodrun", mpirun=version(**shared), **shared)
    return Srun(path="/usr/bin/srun", **shared) if kind == "srun" else version(**shared)


def plan(where=None, **changes):
    where = where or hosts(localhost=2)
    network = "10.0.0.0/24" if len(where) > 1 else None
    topologies = {host.name: machine() for host in where}
    slots = place(where, topologies, np=sum(host.slots for host in where), gpus="all", binding="numa")
    requested = {name: changes.pop(name) for name in REQUESTED if name in changes}
    plain = Plan(
        request=request(terminals=(None, (24, 100)), **requested),
        slots=slots,
        hostnames={host.name: f"{host.name}.local" for host in where},
        local=frozenset(),
        program=TRAIN,
        executable=None,
        job="a job",
        network=network,
        daemon_networks=network,
        rendezvous={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20000"},
        exports=OURS,
        mca=(),
        environment={},
        remarks=(),
        topologies=topologies,
    )
    return replace(plain, **changes)


def rendered(mpi=MPI4, *, kind="mpirun", ssh=SSH, **changes):
    return render(plan(**changes), launcher(mpi, kind, ssh))
