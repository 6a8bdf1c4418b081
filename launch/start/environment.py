"""Pure: which variables of the environment the launcher and the ranks get."""

import re
from collections.abc import Collection, Mapping, Sequence

from launch.errors import CommandError

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


def inherited(environment: Mapping[str, str], exports: Collection[str]) -> dict[str, str]:
    """What a launcher on several hosts gets: what it exports to the ranks, and what it needs itself."""
    return {name: value for name, value in environment.items() if name in exports or LAUNCHER_NEEDS.fullmatch(name)}
