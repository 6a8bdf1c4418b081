"""Pure: the environment that the launcher and each rank get, and the plan in it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from launch.choose.placement import RankSlot
from launch.cores import core_list
from launch.errors import CommandError
from launch.start.command import LaunchSpec

# One exported variable may not be longer (MAX_ARG_STRLEN of Linux); some room is left for its name.
MAX_PLAN_CHARACTERS = 128 * 1024 - 64

# What every rank gets from the environment of hvdlaunch; -x adds others, one name at a time.
EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|OMP_\w+|MKL_\w+|CUDA_HOME|TORCH_\w+|HVDTRAIN_\w+"
    r"|HVDLAUNCH_SEED|HVDLAUNCH_ATTEMPT"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
# What ssh and the launcher need on the host that they start on.
LAUNCHER_NEEDS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TMPDIR|SSH_AUTH_SOCK|XDG_RUNTIME_DIR|SLURM_\w+"
    r"|OMPI_MCA_\w+|PRTE_MCA_\w+|MPIEXEC_TIMEOUT"
)
# What means something on this host alone.
OF_THIS_HOST = ("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")


def exported(environment: Mapping[str, str], extra: Sequence[str]) -> tuple[str, ...]:
    """The names of the variables that ranks get: those on the list that do not look like a secret, and `extra` ones."""
    for name in extra:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise CommandError(
                f"-x {name.split('=')[0]!r}: give the name of a variable alone and set it in the environment, "
                "since every user of a machine can read its command lines"
            )
        if name not in environment:
            raise CommandError(f"-x {name}: there is no such variable in the environment: set it, or leave -x out")
    allowed = {name for name in environment if EXPORTED.fullmatch(name) and not SECRET.search(name)}
    return tuple(sorted({*allowed, *extra, "HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}))


def launcher_environment(spec: LaunchSpec, inherited: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: on one host all that is `inherited`, else only what every host gets."""
    if spec.network is None:
        return {**inherited, **ours}
    kept = {name: value for name, value in inherited.items() if name in spec.exports or LAUNCHER_NEEDS.fullmatch(name)}
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

    A launcher that exports all gives ranks on other hosts also what belongs to this one: that is unset.
    """
    gpu = slot.gpu_uuid or ("" if slot.gpu is None else str(slot.gpu))
    ours = {"OMP_NUM_THREADS": None if slot.threads is None else str(slot.threads), "NCCL_SOCKET_IFNAME": interface}
    # The "=" keeps mlx5_1 from meaning mlx5_10 as well. The ranks of a host must agree on its adapters.
    ours["NCCL_IB_HCA"] = f"={','.join(adapters)}" if adapters and slot.gpu is not None else None
    chosen = {name: value for name, value in ours.items() if value is not None and name not in set_by_user}
    of_this_host = dict.fromkeys(OF_THIS_HOST) if launcher_exports_all else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu, **chosen, **of_this_host}


def plan_json(
    spec: LaunchSpec,
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
            "environment": dict(environment),
        }
        for slot, environment in zip(spec.slots, environments, strict=True)
    ]
    launcher = f"horovodrun, {spec.mpi}" if spec.horovodrun else str(spec.mpi)
    text = json.dumps(
        {"launcher": launcher, "program": spec.program, "environment": dict(recorded), "ranks": ranks},
        separators=(",", ":"),
    )
    if len(text) > MAX_PLAN_CHARACTERS:
        raise CommandError(
            f"the plan of {len(spec.slots)} ranks takes {len(text)} bytes, a variable holds "
            f"{MAX_PLAN_CHARACTERS}: start fewer ranks, or mpirun itself with what hvdlaunch hostfile writes"
        )
    return text
