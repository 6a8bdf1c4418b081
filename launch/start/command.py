"""Pure: a placement, a program and a launcher -> the exact command and its environment.

One table for each launcher: Open MPI 4, Open MPI 5, and horovodrun, which starts one of them.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

from launch.choose.placement import RankSlot
from launch.cores import core_list
from launch.errors import CommandError
from launch.hosts.host import Host
from launch.hosts.hostfile import to_option
from launch.machine.mpi import Mpi
from launch.reach.ssh import SSH_OPTIONS

# One exported variable may not be longer (MAX_ARG_STRLEN of Linux); some room is left for its name.
LONGEST_PLAN = 128 * 1024 - 64

# What every rank may have from the environment that hvdlaunch was started in. More by -x, one name at a time.
EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|OMP_\w+|MKL_\w+|CUDA_HOME|TORCH_\w+|HVDTRAIN_\w+"
    r"|HVDLAUNCH_SEED|HVDLAUNCH_ATTEMPT"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
# What ssh and the launcher themselves need on the machine they start on.
LAUNCHER_NEEDS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TMPDIR|SSH_AUTH_SOCK|XDG_RUNTIME_DIR|SLURM_\w+"
    r"|OMPI_MCA_\w+|PRTE_MCA_\w+|MPIEXEC_TIMEOUT"
)

OF_THIS_HOST = ("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")

CLEAN_UP_S = 10  # to end all ranks that have not saved in time

# A silent link ends the job after 2 s + 3 x 1 s; by default Open MPI waits over ten minutes.
KEEPALIVE = {"oob_tcp_keepalive_time": "2", "oob_tcp_keepalive_intvl": "1", "oob_tcp_keepalive_probes": "3"}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How one major version of Open MPI spells the parameters of its own daemons."""

    option: str
    plm: str  # how daemons are started; in an allocation the batch system's own way has none of our ssh options
    ras: str  # who says which hosts there are: we do
    ssh_arguments: str
    interfaces: str
    whole_names: str  # else a.b and a.c are both host a


RUNTIMES = {
    4: Runtime(
        option="--mca",
        plm="rsh",
        ras="^slurm,tm,lsf,gridengine",
        ssh_arguments="plm_rsh_args",
        interfaces="oob_tcp_if_include",
        whole_names="orte_keep_fqdn_hostnames",
    ),
    5: Runtime(
        option="--prtemca",
        plm="ssh",
        ras="^slurm,pbs,lsf,gridengine,flux",
        ssh_arguments="plm_ssh_args",
        interfaces="prte_if_include",
        whole_names="prte_keep_fqdn_hostnames",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be started, and with what."""

    slots: tuple[RankSlot, ...]
    program: tuple[str, ...]
    python: str  # the interpreter that runs launch.rank.bind, at the same path on every host
    mpi: Mpi
    horovodrun: str | None  # its path if it is to start mpirun
    network: str | None  # CIDR that the hosts share; None on one host
    daemon_networks: str | None  # CIDRs over which mpirun reaches them
    exports: tuple[str, ...]  # names of variables that every rank gets
    as_root: bool


def argv(order: Order) -> list[str]:
    """The words of the command."""
    # -P: a launch.py of the user's in the working folder is not ours.
    program = [order.python, "-P", "-m", "launch.rank.bind", "--", *order.program]
    ranks = ["-np", str(len(order.slots)), "-H", to_option(hosts(order.slots))]
    if order.horovodrun is None:
        root = ["--allow-run-as-root"] if order.as_root else []
        exports = [word for name in order.exports for word in ("-x", name)]
        return [order.mpi.path, *root, *ranks, *BINDING, *_parameters(order), *exports, *program]
    # horovodrun hands these to a shell: every word is quoted. An MPI that ssh finds first must not start instead.
    prefix = ["--prefix", str(PurePath(order.mpi.path).parent.parent)] if order.network else []
    return [
        order.horovodrun,
        "--mpi",
        "--disable-cache",
        *ranks,
        *(["--network-interfaces", order.network] if order.network else []),
        f"--binding-args={shlex.join(BINDING)}",
        f"--mpi-args={shlex.join([*prefix, *_parameters(order)])}",
        *program,
    ]


# bind.py binds, with the cores of the plan.
BINDING = ("--bind-to", "none", "--map-by", "slot")


def _parameters(order: Order) -> list[str]:
    """Open MPI's parameters: ssh that asks nothing, links that may not go silent, the network, TCP that is told it."""
    runtime = RUNTIMES.get(order.mpi.version[0]) if order.mpi.name == "Open MPI" else None
    if runtime is None:
        raise CommandError(
            f"{order.mpi.path} is {order.mpi}: Open MPI 4 or 5 is needed, put its bin folder first in PATH"
        )
    daemons = {
        "plm": runtime.plm,
        "ras": runtime.ras,
        runtime.ssh_arguments: shlex.join(SSH_OPTIONS),
        **KEEPALIVE,
        runtime.whole_names: "1",
    }
    ranks = {"pml": "ob1", "btl": "^openib"}  # UCX would choose networks by itself; GPUs talk through NCCL
    if order.daemon_networks:
        daemons[runtime.interfaces] = order.daemon_networks
    if order.horovodrun is None:
        ranks["btl_tcp_if_include"] = order.network or "127.0.0.0/8"
    else:
        ranks = {}  # it gives the same ones itself
    return [
        *(word for name, value in daemons.items() for word in (runtime.option, name, value)),
        *(word for name, value in ranks.items() for word in ("--mca", name, value)),
    ]


def hosts(slots: Iterable[RankSlot]) -> tuple[Host, ...]:
    """The hosts that have ranks, with as many slots."""
    return tuple(Host(name=name, slots=ranks) for name, ranks in Counter(slot.host for slot in slots).items())


def exported(environment: Mapping[str, str], asked: Sequence[str]) -> tuple[str, ...]:
    """The names that ranks get: the allow-list's, without what looks like a secret, and those `asked` for."""
    for name in asked:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise CommandError(
                f"-x {name.split('=')[0]!r}: give the name of a variable alone and set it in the environment, "
                "since every user of a machine can read its command lines"
            )
        if name not in environment:
            raise CommandError(f"-x {name}: there is no such variable in the environment: set it, or leave -x out")
    allowed = {name for name in environment if EXPORTED.fullmatch(name) and not SECRET.search(name)}
    return tuple(sorted({*allowed, *asked, "HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}))


def environment(order: Order, inherited: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """What the launcher is started with: on one host all that is `inherited`, else only what every host gets."""
    if order.network is None:
        return {**inherited, **ours}
    kept = {name: value for name, value in inherited.items() if name in order.exports or LAUNCHER_NEEDS.fullmatch(name)}
    return {**kept, **ours}


def rank_environment(
    slot: RankSlot,
    *,
    interface: str | None,
    adapters: Sequence[str],
    set_by_user: Iterable[str],
    launcher_exports_all: bool = False,
) -> dict[str, str | None]:
    """What launch.rank.bind sets on one rank, or unsets (None); the user's settings of NCCL and OpenMP stay.

    What the launcher alone needs of this host is unset where it gives all that it has to ranks on other hosts.
    """
    gpu = slot.gpu_uuid or ("" if slot.gpu is None else str(slot.gpu))
    ours = {"OMP_NUM_THREADS": None if slot.threads is None else str(slot.threads), "NCCL_SOCKET_IFNAME": interface}
    # The "=" keeps mlx5_1 from meaning mlx5_10 as well. The ranks of a host must agree on its adapters.
    ours["NCCL_IB_HCA"] = f"={','.join(adapters)}" if adapters and slot.gpu is not None else None
    chosen = {name: value for name, value in ours.items() if value is not None and name not in set_by_user}
    of_this_host = dict.fromkeys(OF_THIS_HOST) if launcher_exports_all else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu, **chosen, **of_this_host}


def plan(
    order: Order,
    hostnames: Mapping[str, str | None],
    environments: Sequence[Mapping[str, str | None]],
    recorded: Mapping[str, str],
) -> str:
    """The placement as JSON, for launch.rank.bind and for placement.json of the run folder."""
    ranks = [
        {
            **asdict(slot),
            "cores": core_list(slot.cores),
            "hostname": hostnames[slot.host],
            "environment": dict(own),
        }
        for slot, own in zip(order.slots, environments, strict=True)
    ]
    launcher = f"horovodrun, {order.mpi}" if order.horovodrun else str(order.mpi)
    text = json.dumps(
        {"launcher": launcher, "program": order.program, "environment": dict(recorded), "ranks": ranks},
        separators=(",", ":"),
    )
    if len(text) > LONGEST_PLAN:
        raise CommandError(
            f"the plan of {len(order.slots)} ranks takes {len(text)} bytes, a variable holds "
            f"{LONGEST_PLAN}: start fewer ranks, or mpirun itself with what hvdlaunch hostfile writes"
        )
    return text


def in_apptainer(program: Sequence[str], image: str) -> tuple[str, ...]:
    """The program inside an Apptainer image, with the host's GPU driver."""
    return ("apptainer", "exec", "--nv", image, *program)


def sbatch(
    command: Sequence[str], *, name: str, folder: str, np: int, nodes: Sequence[str], gpus: bool, grace_s: float
) -> str:
    """A Slurm batch script that starts `command`, which finds the nodes of its allocation by itself.

    With `nodes` exactly these; else Slurm chooses. The command gets SIGUSR1, `grace_s` and some seconds before the end;
    started again by Slurm the job keeps its name, and with it its run folder.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # a line end in it would begin a line of the script
    lines = [
        f"#SBATCH --job-name={plain}",
        f"#SBATCH --ntasks={np}",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR1@{math.ceil(grace_s) + CLEAN_UP_S}",
    ]
    if nodes:
        lines += [f"#SBATCH --nodes={len(nodes)}", f"#SBATCH --nodelist={','.join(nodes)}"]
    if gpus:
        lines.append("#SBATCH --gpus-per-task=1")
    lines += [
        f"cd {shlex.quote(folder)} || exit 2",
        f'export HVDLAUNCH_JOB="${{HVDLAUNCH_JOB:-{plain}-$SLURM_JOB_ID}}"',
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(["#!/bin/bash", *lines, ""])
