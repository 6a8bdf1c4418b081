"""Pure: which variables of the environment the launcher and the ranks get."""

import re
from collections.abc import Collection, Mapping, Sequence

from launch.errors import CommandError
from launch.hosts.host import shown
from launch.machine.condition import SECRET, SETTING

# What every rank gets from the environment of hvdlaunch; -x adds others, one name at a time.
EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|OMP_\w+|MKL_\w+|CUDA_HOME|CUBLAS_\w+|TORCH_\w+|HF_HOME"
    r"|UCX_\w+|FI_\w+|OPAL_PREFIX|HVDTRAIN_\w+|HVDLAUNCH_SEED|HVDLAUNCH_ATTEMPT|HVDLAUNCH_ELASTIC|HVDLAUNCH_GROW|HVDLAUNCH_WINDOWS"
    rf"|{SETTING.pattern}"
    r"|(?i:https?|ftp|all|no)_(?i:proxy)"
)
PROXY = re.compile(r"\w+_proxy", re.IGNORECASE)  # as http://user:password@proxy:3128
# What no program misses on another host: the session, what has set up this process, what an image was built with.
OF_THE_SESSION = re.compile(
    r"_.*|PWD|OLDPWD|SHLVL|HOST(NAME)?|MAIL|TZ|TMP|TEMP|EDITOR|\w*PAGER|\w+_COLORS|COLORTERM|DISPLAY|LANGUAGE|MANPATH"
    r"|INFOPATH|(BASH|HIST|LESS|MODULE|TERM_|TMUX)\w*|LOADEDMODULES|DEBIAN_FRONTEND|\w+_VERSION|CUDA_VISIBLE_DEVICES"
    r"|(XDG|DBUS|SSH|GPG|SUDO|GIT|VSCODE|CONDA|LMOD|PBS|OMPI|PMIX?|HVDLAUNCH|HOROVOD|NV|NVIDIA)_\w+"
)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MAX_NAMED = 8
# What ssh and the launcher need on the host that they start on.
LAUNCHER_NEEDS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TMPDIR|SSH_AUTH_SOCK|XDG_RUNTIME_DIR|SLURM_\w+"
    r"|OMPI_MCA_\w+|PRTE_MCA_\w+|MPIEXEC_TIMEOUT"
)
# What means something on this host alone.
OF_THIS_HOST = ("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")


def require_plain_job(environment: Mapping[str, str]) -> None:
    """CommandError where HVDLAUNCH_JOB cannot be the name of a run folder."""
    job = environment.get("HVDLAUNCH_JOB")
    if job and not re.fullmatch(r"\w[\w.-]*", job):  # with a / it would lead out of runs/
        raise CommandError(f"HVDLAUNCH_JOB={shown(job)}: use a name of letters, digits, '.', '_' and '-', or unset it")


def exported(environment: Mapping[str, str], extra: Sequence[str]) -> tuple[str, ...]:
    """The names of the variables that ranks get: those on the list that do not look like a secret, and `extra` ones."""
    for name in extra:
        if not NAME.fullmatch(name):
            raise CommandError(
                f"-x {name.split('=')[0]!r}: pass only the name of a variable and set it in the environment, "
                "since every user of a machine can read its command lines"
            )
    if missing := [f"-x {name}" for name in extra if name not in environment]:
        them = "it" if len(missing) == 1 else "them"
        raise CommandError(f"{' '.join(missing)}: not set in the environment. Set {them}, or leave {them} out.")
    allowed = {name for name in environment if EXPORTED.fullmatch(name) and not is_secret(name, environment[name])}
    return tuple(sorted({*allowed, *extra, "HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}))


def inherited(environment: Mapping[str, str], exports: Collection[str]) -> dict[str, str]:
    """What a launcher on several hosts gets: what it exports to the ranks, and what it needs itself."""
    return {name: value for name, value in environment.items() if name in exports or LAUNCHER_NEEDS.fullmatch(name)}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret, by its name, or as a proxy with a password in its value."""
    return bool(SECRET.search(name) or (PROXY.fullmatch(name) and "@" in value))


def note_left_behind(environment: Mapping[str, str], exports: Collection[str]) -> str | None:
    """A line with the names of variables that the ranks of several hosts lack and might need; None if there is none."""
    might_need = (
        name
        for name in environment
        if EXPORTED.fullmatch(name) or not (LAUNCHER_NEEDS.fullmatch(name) or OF_THE_SESSION.fullmatch(name))
    )
    names = sorted(name for name in might_need if name not in exports and NAME.fullmatch(name))
    if not names:
        return None
    secret = {name for name in names if PROXY.fullmatch(name) and "@" in environment[name]}
    shown_names = [f"{name} (has a password)" if name in secret else name for name in names]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    listed = ", ".join(shown_names[:MAX_NAMED]) + more
    return f"note: {listed} not passed to the ranks. Add -x NAME for those your program needs."
