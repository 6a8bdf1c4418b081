"""What is to be started in the tests of commands and environments."""

from dataclasses import replace

from launch.machine.mpi import Mpi
from launch.placement.slots import place
from launch.probe.ssh import SSH
from launch.start.plan import Launcher, Plan
from launch.start.render import render
from tests.unit.machines import hosts, machine

OURS = ("HVDLAUNCH_JOB", "HVDLAUNCH_PLAN", "HVDLAUNCH_REPORT", "PATH")
MPI4 = Mpi(path="/opt/openmpi/bin/mpirun", name="Open MPI", version=(4, 1, 8))
MPI5 = replace(MPI4, version=(5, 0, 3))
THREE = hosts(**{"h1": 2, "h2.cluster.example": 1})
HOROVODRUN = "/opt/venv/bin/horovodrun"
TRAIN = ("python", "-m", "hvdtrain.effnet", "--data", "digits")


def launcher(mpi=MPI4, horovodrun=None, ssh=SSH):
    return Launcher(python="/opt/venv/bin/python", mpi=mpi, horovodrun=horovodrun, ssh=ssh)


def plan(where=None, **changes):
    where = where or hosts(localhost=2)
    network = "10.0.0.0/24" if len(where) > 1 else None
    slots = place(
        where,
        {host.name: machine() for host in where},
        np=sum(host.slots for host in where),
        gpus="all",
        binding="numa",
    )
    plain = Plan(
        slots=slots,
        hostnames={host.name: f"{host.name}.local" for host in where},
        local=frozenset(),
        program=TRAIN,
        executable=None,
        job="a job",
        ranks_per_replica=None,
        network=network,
        daemon_networks=network,
        rendezvous={"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20000"},
        exports=OURS,
        mca=(),
        environment={},
        as_root=False,
        show="0",
        terminals=(None, (24, 100)),
        remarks=(),
    )
    return replace(plain, **changes)


def rendered(mpi=MPI4, *, horovodrun=None, ssh=SSH, **changes):
    return render(plan(**changes), launcher(mpi, horovodrun, ssh))
