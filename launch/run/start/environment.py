"""Pure: which environment variables the launcher and the ranks get."""

import re
from collections.abc import Collection, Mapping, Sequence

from launch.errors import CommandError
from launch.hosts.host import shown
from launch.machine.condition import SECRET, SETTING

# Variables that every rank gets from the environment of hvdlaunch; -x adds others by name.
EXPORTED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|OMP_\w+|MKL_\w+|CUDA_HOME|CUBLAS_\w+|TORCH_\w+|HF_HOME"
    r"|UCX_\w+|FI_\w+|OPAL_PREFIX|HVDTRAIN_\w+|HVDLAUNCH_SEED|HVDLAUNCH_WINDOWS"
    rf"|{SETTING.pattern}"
    r"|(?i:https?|ftp|all|no)_(?i:proxy)"
)
PROXY = re.compile(r"\w+_proxy", re.IGNORECASE)  # for example http://user:password@proxy:3128
# Variables that no program needs on another host: those of the session, of this process's setup, of an image build.
OF_THE_SESSION = re.compile(
    r"_.*|PWD|OLDPWD|SHLVL|HOST(NAME)?|MAIL|TZ|TMP|TEMP|EDITOR|\w*PAGER|\w+_COLORS|COLORTERM|DISPLAY|LANGUAGE|MANPATH"
    r"|INFOPATH|(BASH|HIST|LESS|MODULE|TERM_|TMUX)\w*|LOADEDMODULES|DEBIAN_FRONTEND|\w+_VERSION|CUDA_VISIBLE_DEVICES"
    r"|(XDG|DBUS|SSH|GPG|SUDO|GIT|VSCODE|CONDA|LMOD|PBS|OMPI|PMIX?|HVDLAUNCH|HOROVOD|NV|NVIDIA)_\w+"
)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MAX_NAMED = 8
# Variables that ssh and the launcher need on the host where they start.
LAUNCHER_NEEDS = re.compile(
    r"HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TMPDIR|SSH_AUTH_SOCK|XDG_RUNTIME_DIR|SLURM_\w+"
    r"|KRB5CCNAME|(OMPI|PRTE|PMIX)_MCA_\w+|MPIEXEC_TIMEOUT"
)
# Variables that srun, mpirun or another hvdlaunch sets for its tasks, such as this process; no setting of the user.
OF_ANOTHER_LAUNCHER = re.compile(r"PMI[2X]?_(?!MCA_|PREFIX$|INSTALL_PREFIX$)\w+|HVDLAUNCH_RANK|RANK")
# Variables that are valid on this host only.
OF_THIS_HOST = ("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR")


def require_plain_job(environment: Mapping[str, str]) -> None:
    """Raise CommandError if HVDLAUNCH_JOB cannot be the name of a run folder."""
    job = environment.get("HVDLAUNCH_JOB")
    if job and not re.fullmatch(r"\w[\w.-]*", job):  # a / would lead out of runs/
        raise CommandError(f"HVDLAUNCH_JOB={shown(job)}: use a name of letters, digits, '.', '_' and '-', or unset it")


def exported(environment: Mapping[str, str], extra: Sequence[str]) -> tuple[str, ...]:
    """Return the variables for the ranks: those on the list that do not look like a secret, and the `extra` ones."""
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


def inherited(environment: Mapping[str, str], exports: Collection[str], *, local: bool) -> dict[str, str]:
    """Return the environment of a launcher: what it exports to the ranks, and what it needs; on this host alone all.

    The variables of another launcher are left out: mpirun and the ranks would take them for their own.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in exports or (not OF_ANOTHER_LAUNCHER.fullmatch(name) if local else LAUNCHER_NEEDS.fullmatch(name))
    }


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by its name, or is a proxy with a password."""
    return bool(SECRET.search(name) or (PROXY.fullmatch(name) and "@" in value))


def note_left_behind(environment: Mapping[str, str], exports: Collection[str]) -> str | None:
    """Return a note about variables that ranks on several hosts lack and might need; None if there are none."""
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
