"""Pure: a placement, a program and a launcher -> the exact command.

One table for each launcher: Open MPI 4, Open MPI 5, and horovodrun, which starts one of them.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from launch.errors import CommandError
from launch.hosts.host import Host
from launch.hosts.hostfile import to_option
from launch.machine.mpi import Parameter
from launch.placement.network import LOOPBACK
from launch.placement.slots import RankSlot
from launch.probe.ssh import UNANSWERED, chosen_agent
from launch.start.plan import Launcher, Plan


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The spelling of parameters for one major version of Open MPI's daemons."""

    option: str
    plm: str  # starts daemons by ssh and not by the batch system, which ignores our ssh options
    agent: str  # the program that starts daemons
    no_agents: tuple[str, ...]  # qrsh and llspawn, which would take its place in a job of SGE or LoadLeveler
    ras: str  # takes the host list from us
    ssh_arguments: str
    interfaces: str
    whole_names: str  # else a.b and a.c both become host a


RUNTIMES = {
    4: Runtime(
        option="--mca",
        plm="rsh",
        agent="plm_rsh_agent",
        no_agents=("plm_rsh_disable_qrsh", "plm_rsh_disable_llspawn"),
        ras="^slurm,tm,lsf,gridengine,loadleveler,alps",
        ssh_arguments="plm_rsh_args",
        interfaces="oob_tcp_if_include",
        whole_names="orte_keep_fqdn_hostnames",
    ),
    5: Runtime(
        option="--prtemca",
        plm="ssh",
        agent="plm_ssh_agent",
        no_agents=("plm_ssh_disable_qrsh", "plm_ssh_disable_llspawn"),
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
    # Open MPI 5 knows this machine by few of its names.
    hosts = [replace(host, name="localhost") if host.name in plan.local else host for host in hosts_of(plan.slots)]
    ranks = ["-np", str(len(plan.slots)), "-H", to_option(hosts)]
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
    """Return Open MPI's parameters, except those that the user has set."""
    runtime = _runtime(launcher)
    set_by_user = {_replaces(parameter) for parameter in plan.mca}
    if launcher.horovodrun is not None:
        _refuse_exclusion(plan.mca)
    # mpirun starts its daemons as hvdlaunch has probed the hosts, also where the variable is that of the other version.
    agent = (runtime.option, runtime.agent, " ".join(launcher.ssh.agent))
    ours = [agent, *(each for each in _ours(plan, launcher) if each[:2] not in set_by_user)]
    return [word for each in ours for word in each]


def _ours(plan: Plan, launcher: Launcher) -> list[tuple[str, str, str]]:
    """Return option, name and value: ssh without prompts, detection of silent links, networks of daemons and ranks."""
    runtime = _runtime(launcher)
    daemons = {
        "plm": runtime.plm,
        "ras": runtime.ras,
        **dict.fromkeys(runtime.no_agents, "1"),
        # By default Open MPI waits over ten minutes for a silent link.
        "oob_tcp_keepalive_time": str(launcher.ssh.sign_every_s),
        "oob_tcp_keepalive_intvl": str(launcher.ssh.sign_every_s),
        "oob_tcp_keepalive_probes": str(UNANSWERED),
        runtime.whole_names: "1",
    }
    if launcher.ssh.arguments:
        daemons[runtime.ssh_arguments] = " ".join(launcher.ssh.arguments)
    if plan.daemon_networks:
        daemons[runtime.interfaces] = plan.daemon_networks
    ranks = {}  # horovodrun sets the same parameters
    if launcher.horovodrun is None:
        ranks = {"pml": "ob1", "btl": "^openib"}  # UCX would choose networks by itself; GPUs use NCCL
        ranks["btl_tcp_if_include"] = plan.network or str(LOOPBACK)
    return [(runtime.option, *each) for each in daemons.items()] + [("--mca", *each) for each in ranks.items()]


def kept(plan: Plan, launcher: Launcher) -> list[Parameter]:
    """Return the parameters of the user that replace ours, or name the agent."""
    ours = {each[:2] for each in _ours(plan, launcher)}
    agent = chosen_agent(plan.mca) if plan.network else None
    return [each for each in plan.mca if _replaces(each) in ours or each is agent]


def _replaces(parameter: Parameter) -> tuple[str, str]:
    """Return the option and the name of our parameter that this one replaces; an exclude replaces the include."""
    return "--prtemca" if parameter.of_prrte else "--mca", parameter.name.replace("_exclude", "_include")


def _refuse_exclusion(parameters: Iterable[Parameter]) -> None:
    """Raise CommandError if an interface is excluded: horovodrun includes some, and Open MPI takes only one of both."""
    for parameter in parameters:
        if parameter.name == "btl_tcp_if_exclude" and not parameter.of_prrte:
            remedy = "take it out" if parameter.in_file else "unset it"
            raise CommandError(
                f"{parameter} does not work with horovodrun, which sets btl_tcp_if_include: {remedy}, or use "
                "--launcher mpirun"
            )


def _runtime(launcher: Launcher) -> Runtime:
    """Return the spelling of this launcher's MPI; CommandError if it is not Open MPI 4 or 5."""
    runtime = RUNTIMES.get(launcher.mpi.version[0]) if launcher.mpi.name == "Open MPI" else None
    if runtime is None:
        raise CommandError(
            f"{launcher.mpi.path} is {launcher.mpi}: Open MPI 4 or 5 is needed, put its bin folder first in PATH"
        )
    return runtime


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
