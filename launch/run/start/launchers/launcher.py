"""The parts of a way to start ranks: its command, its variables, its signals, and its messages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from launch.hosts.ssh import SSH, Ssh, chosen_agent
from launch.machine.mpi import Mpi, Parameter
from launch.run.start.plan import Plan

if TYPE_CHECKING:
    from launch.run.start.launchers.openmpi import OpenMpi


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The messages of a launcher about itself and its ranks: regular expressions, and the beginnings of its lines."""

    lines: tuple[bytes, ...]
    framed: tuple[bytes, ...] = ()  # of messages between two lines of dashes
    # A rank has died (groups `rank`, and `status` or `signal`, a number with its name), or a host is lost (`host`).
    deaths: tuple[str, ...]
    remarks: str  # whole lines that are dropped
    consequences: str = "(?!)"  # the beginning of messages that are shown only if no cause is found


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """A way to start ranks, with the programs that it needs."""

    python: str  # the interpreter that runs launch.run.rank.bind, at the same path on every host
    mpi: Mpi  # of the ranks
    ssh: Ssh = SSH  # how to reach other hosts

    name: ClassVar[str]  # as --launcher spells it
    rank_variable: ClassVar[str]  # the variable with the rank of a process
    local_rank_variable: ClassVar[str]
    receivers: ClassVar[tuple[str, ...]]  # names of the program that passes signals on to the ranks
    messages: ClassVar[Messages]
    has_daemons: ClassVar[bool] = True  # of its own, which connect to this machine
    exports_all: ClassVar[bool] = False  # ranks on other hosts also get the variables of this host
    not_in_pods: ClassVar[str | None] = None  # why it cannot start the ranks of an MPIJob

    def __str__(self) -> str:
        return f"{self.name}, {self.mpi}"

    @classmethod
    @abstractmethod
    def over(cls, mpirun: "OpenMpi", *, is_dry: bool) -> "Launcher":
        """Return the launcher for ranks of this mpirun's MPI; CommandError if it is missing, unless nothing starts."""

    def argv(self, plan: Plan) -> list[str]:
        """Return the command as a list of arguments; CommandError if it does not support what the plan needs."""
        # -P: ignore a launch.py in the user's working folder.
        return [*self.start(plan), self.python, "-P", "-m", "launch.run.rank.bind", "--", *plan.program]

    @abstractmethod
    def start(self, plan: Plan) -> list[str]:
        """Return the part of the command before the program that each rank runs."""

    def variables(self, plan: Plan) -> dict[str, str]:
        """Return the variables that the command needs besides the plan's."""
        return {}

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return the environment of the command, without the variables with the plan."""
        return {**plan.environment, **self.variables(plan)}

    @abstractmethod
    def ours(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return option, name and value of the parameters of Open MPI that we set, unless the user does."""

    def parameters(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return our parameters, except those that the user has set."""
        set_by_user = {_replaces(parameter) for parameter in plan.mca}
        return [each for each in self.ours(plan) if each[:2] not in set_by_user]

    def kept(self, plan: Plan) -> list[Parameter]:
        """Return the parameters of the user that replace ours, or name the agent."""
        names = {each[:2] for each in self.ours(plan)}
        agent = chosen_agent(plan.mca) if plan.network else None
        return [each for each in plan.mca if _replaces(each) in names or each is agent]


def _replaces(parameter: Parameter) -> tuple[str, str]:
    """Return the option and the name of our parameter that this one replaces; an exclude replaces the include."""
    return "--prtemca" if parameter.of_prrte else "--mca", parameter.name.replace("_exclude", "_include")
