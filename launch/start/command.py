"""Pure: a placement, a program and a launcher -> the exact command.

One table for each launcher: Open MPI 4, Open MPI 5, and horovodrun, which starts one of them.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from launch.errors import CommandError
from launch.hosts.host import Host
from launch.hosts.hostfile import to_option
from launch.placement.network import LOOPBACK
from launch.placement.slots import RankSlot
from launch.probe.ssh import SSH, UNANSWERED
from launch.start.plan import Launcher, Plan


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The spelling of parameters for one major version of Open MPI's daemons."""

    option: str
    plm: str  # starts daemons by ssh and not by the batch system, which ignores our ssh options
    agent: str  # the program that starts daemons
    ras: str  # takes the host list from us
    ssh_arguments: str
    interfaces: str
    whole_names: str  # else a.b and a.c both become host a


RUNTIMES = {
    4: Runtime(
        option="--mca",
        plm="rsh",
        agent="plm_rsh_agent",
        ras="^slurm,tm,lsf,gridengine",
        ssh_arguments="plm_rsh_args",
        interfaces="oob_tcp_if_include",
        whole_names="orte_keep_fqdn_hostnames",
    ),
    5: Runtime(
        option="--prtemca",
        plm="ssh",
        agent="plm_ssh_agent",
        ras="^slurm,pbs,lsf,gridengine,flux",
        ssh_arguments="plm_ssh_args",
        interfaces="prte_if_include",
        whole_names="prte_keep_fqdn_hostnames",
    ),
}


def argv(plan: Plan, launcher: Launcher) -> list[str]:
    """Return the command as a list of arguments."""
    # -P: ignore a launch.py in the user's working folder.
    outlive = _outliving(plan, launcher) if plan.elastic else []
    program = [launcher.python, "-P", "-m", "launch.rank.bind", "--", *plan.program]
    ranks = ["-np", str(len(plan.slots)), "-H", to_option(hosts_of(plan.slots))]
    if launcher.horovodrun is None:
        root = ["--allow-run-as-root"] if plan.as_root else []
        exports = [word for name in plan.exports for word in ("-x", name)]
        return [
            launcher.mpi.path,
            *root,
            *outlive,
            *ranks,
            *(GROWING if plan.grow else BINDING),
            *_parameters(plan, launcher),
            *exports,
            *program,
        ]
    # horovodrun passes these to a shell, so every argument is quoted. The prefix keeps ssh from finding another MPI
    # first.
    prefix = ["--prefix", str(PurePath(launcher.mpi.path).parent.parent)] if plan.network else []
    return [
        launcher.horovodrun,
        "--mpi",
        "--disable-cache",
        *ranks,
        *(["--network-interfaces", plan.network] if plan.network else []),
        f"--binding-args={shlex.join(BINDING)}",
        f"--mpi-args={shlex.join([*prefix, *_parameters(plan, launcher)])}",
        *program,
    ]


def _outliving(plan: Plan, launcher: Launcher) -> list[str]:
    """Return the arguments that let ranks survive a loss.

    Raises CommandError if this MPI does not support that, or for --grow on several hosts.
    """
    if launcher.horovodrun is not None:
        raise CommandError("--elastic does not work with --launcher horovodrun. Use only one.")
    if (launcher.mpi.name, launcher.mpi.version[0]) != ("Open MPI", 5):
        raise CommandError(
            f"--elastic: {launcher.mpi.path} is {launcher.mpi}, whose ranks do not outlive one that dies: MPI=5 make "
            "setup, and start from its environment"
        )
    if plan.grow and len({slot.host for slot in plan.slots}) > 1:
        raise CommandError(
            "--grow: with Open MPI 5.0.11 replacement ranks can join on one host only: drop --grow, or use one host; "
            "with --restarts lost hosts come back when the run starts again"
        )
    return ["--with-ft", "ulfm"]


# launch.rank.bind binds to the cores of the plan.
BINDING = ("--bind-to", "none", "--map-by", "slot")
# Open MPI 5.0.11 does not free the slot of a lost rank.
GROWING = (*BINDING[:-1], "slot:OVERSUBSCRIBE")


def _parameters(plan: Plan, launcher: Launcher) -> list[str]:
    """Return Open MPI's parameters: ssh without prompts, detection of silent links, networks for daemons and ranks."""
    runtime = RUNTIMES.get(launcher.mpi.version[0]) if launcher.mpi.name == "Open MPI" else None
    if runtime is None:
        raise CommandError(
            f"{launcher.mpi.path} is {launcher.mpi}: Open MPI 4 or 5 is needed, put its bin folder first in PATH"
        )
    ssh = {runtime.agent: " ".join(launcher.ssh.agent)} if launcher.ssh.agent != SSH.agent else {}
    if launcher.ssh.arguments:
        ssh[runtime.ssh_arguments] = " ".join(launcher.ssh.arguments)
    daemons = {
        "plm": runtime.plm,
        "ras": runtime.ras,
        **ssh,
        # By default Open MPI waits over ten minutes for a silent link.
        "oob_tcp_keepalive_time": str(launcher.ssh.sign_every_s),
        "oob_tcp_keepalive_intvl": str(launcher.ssh.sign_every_s),
        "oob_tcp_keepalive_probes": str(UNANSWERED),
        runtime.whole_names: "1",
    }
    ranks = {"pml": "ob1", "btl": "^openib"}  # UCX would choose networks by itself; GPUs use NCCL
    if plan.daemon_networks:
        daemons[runtime.interfaces] = plan.daemon_networks
    if launcher.horovodrun is None:
        ranks["btl_tcp_if_include"] = plan.network or str(LOOPBACK)
    else:
        ranks = {}  # horovodrun sets the same parameters
    return [
        *(word for name, value in _unless_set(daemons, plan.mca) for word in (runtime.option, name, value)),
        *(word for name, value in _unless_set(ranks, plan.mca) for word in ("--mca", name, value)),
    ]


def set_parameters(environment: Iterable[str]) -> frozenset[str]:
    """Return the parameters of Open MPI that these variables set."""
    matches = (re.fullmatch(r"(?:OMPI|PRTE)_MCA_(\w+)", name) for name in environment)
    return frozenset(match[1] for match in matches if match)


def _unless_set(ours: Mapping[str, str], mca: frozenset[str]) -> list[tuple[str, str]]:
    """Return our parameters that the user has not set, and drop an include that conflicts with the user's exclude."""
    twins = {name: name.replace("_include", "_exclude") for name in ours}
    return [(name, value) for name, value in ours.items() if mca.isdisjoint({name, twins[name]})]


def hosts_of(slots: Iterable[RankSlot]) -> tuple[Host, ...]:
    """Return the hosts that have ranks, with their numbers of slots."""
    return tuple(Host(name=name, slots=ranks) for name, ranks in Counter(slot.host for slot in slots).items())


# Relative to the run's working folder, on each host; mpirun also sets the rank under horovodrun.
NSYS_REPORT = "%q{HVDLAUNCH_JOB}-rank-%q{OMPI_COMM_WORLD_RANK}"


def under_nsys(program: Sequence[str]) -> tuple[str, ...]:
    """Run the program under Nsight Systems, with a report per rank: GPU, ranges, waits and MPI, no CPU samples."""
    return (
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt,mpi",
        "--mpi-impl=openmpi",
        "--sample=none",
        "--cpuctxsw=none",
        f"--output={NSYS_REPORT}",
        "--force-overwrite=true",
        *program,
    )


def in_apptainer(program: Sequence[str], image: str) -> tuple[str, ...]:
    """Run the program in an Apptainer image, with the host's GPU driver."""
    return ("apptainer", "exec", "--nv", image, *program)
