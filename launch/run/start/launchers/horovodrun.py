"""horovodrun, which starts mpirun in a shell."""

import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath

from launch.errors import CommandError
from launch.process import find
from launch.run.start.launchers.launcher import Launcher
from launch.run.start.launchers.openmpi import BINDING, OpenMpi, np_and_hosts
from launch.run.start.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Horovodrun(Launcher):
    """horovodrun over an mpirun."""

    path: str
    mpirun: OpenMpi

    name = "horovodrun"
    rank_variable = OpenMpi.rank_variable
    local_rank_variable = OpenMpi.local_rank_variable
    receivers = OpenMpi.receivers  # its shell would just die
    messages = OpenMpi.messages
    exports_all = True
    not_in_pods = "it does not know the ssh port of the pods"

    @classmethod
    def over(cls, mpirun: OpenMpi, *, is_dry: bool) -> Launcher:
        """Return the horovodrun in PATH."""
        path = find("horovodrun") or ("horovodrun" if is_dry else None)
        if path is None:
            raise CommandError("no horovodrun on PATH: activate the environment that has it, or use --launcher mpirun")
        return cls(path=path, mpirun=mpirun, python=mpirun.python, mpi=mpirun.mpi, ssh=mpirun.ssh)

    def start(self, plan: Plan) -> list[str]:
        """Return horovodrun with its options; it sets the parameters of ranks."""
        for parameter in plan.mca:
            if parameter.name == "btl_tcp_if_exclude" and not parameter.of_prrte:  # Open MPI takes only one of both
                remedy = "take it out" if parameter.in_file else "unset it"
                raise CommandError(
                    f"{parameter} does not work with horovodrun, which sets btl_tcp_if_include: {remedy}, or use "
                    "--launcher mpirun"
                )
        # horovodrun passes these to a shell, so every argument is quoted. The prefix keeps ssh from finding another MPI
        # first.
        prefix = ["--prefix", str(PurePath(self.mpi.path).parent.parent)] if plan.network else []
        parameters = [*self.mpirun.agent(), *chain.from_iterable(self.parameters(plan))]
        return [
            self.path,
            "--mpi",
            "--disable-cache",
            *np_and_hosts(plan),
            *(["--network-interfaces", plan.network] if plan.network else []),
            f"--binding-args={shlex.join(BINDING)}",
            f"--mpi-args={shlex.join([*prefix, *parameters])}",
        ]

    def ours(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return the parameters of daemons."""
        return self.mpirun.of_daemons(plan)
