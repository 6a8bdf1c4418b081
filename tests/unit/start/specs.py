"""What is to be started in the tests of commands and environments."""

from dataclasses import replace

from launch.choose.placement import place
from launch.machine.mpi import Mpi
from launch.start.command import LaunchSpec
from tests.unit.machines import hosts, machine

OURS = ("HVDLAUNCH_JOB", "HVDLAUNCH_PLAN", "HVDLAUNCH_REPORT", "PATH")
MPI4 = Mpi(path="/opt/openmpi/bin/mpirun", name="Open MPI", version=(4, 1, 8))
MPI5 = replace(MPI4, version=(5, 0, 3))
THREE = hosts(**{"h1": 2, "h2.cluster.example": 1})
HOROVODRUN = "/opt/venv/bin/horovodrun"
TRAIN = ("python", "-m", "hvdtrain.effnet", "--data", "digits")


def spec(mpi=MPI4, *, where=None, **changes):
    where = where or hosts(localhost=2)
    several = len(where) > 1
    slots = place(
        where,
        {host.name: machine() for host in where},
        np=sum(host.slots for host in where),
        gpus="auto",
        binding="numa",
    )
    plain = LaunchSpec(
        slots=slots,
        program=TRAIN,
        python="/opt/venv/bin/python",
        mpi=mpi,
        horovodrun=None,
        network="10.0.0.0/24" if several else None,
        daemon_networks="10.0.0.0/24" if several else None,
        exports=OURS,
        as_root=False,
    )
    return replace(plain, **changes)
