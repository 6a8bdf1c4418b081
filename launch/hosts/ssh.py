"""Runs commands on other hosts over ssh or a replacement, and explains failures.

The replacement for Slurm is launch.hosts.srun.
"""

import contextlib
import math
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from launch.errors import HostError, ProcessError
from launch.hosts import srun
from launch.machine.mpi import Parameter, first
from launch.process import Answer, ask, find

# No prompts and no unknown host keys.
STRICT = ("BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=5")
# Open MPI's names of a parameter: programs separated by ":"; the first that exists is used.
AGENTS = ("plm_ssh_agent", "prte_ssh_agent", "plm_rsh_agent", "orte_rsh_agent", "pls_rsh_agent")
NO_CHOICE = "ssh : rsh"  # the default of Open MPI, as a file of an installation has it
SILENCE_S = 30.0
UNANSWERED = 4  # consecutive keepalives without a reply on a dead link
REACH_TIMEOUT_S = 4.0  # to find out whether a host is reachable
SSH_FAILED = 255  # status of ssh itself; all others come from the remote shell, the remote program or srun
MAX_DETAILS = 30  # lines

# Pattern -> the message for the user; the first that matches is used. A profile may print any other words first: ssh's
# patterns name their speaker, and the others see only the last line and those about the probe.
SSH_TROUBLES = {  # with status 255
    r"^(ssh|channel \d+): .*Connection refused": "connection refused. Start sshd on {host}, or name another host.",
    "^ssh: Could not resolve hostname .*Temporary failure": "the name server does not answer. Check /etc/resolv.conf, "
    "or add {host} to /etc/hosts.",
    "^ssh: Could not resolve hostname|^channel .*Name or service not known": "unknown host name. Correct -H, or add "
    "{host} to /etc/hosts or ~/.ssh/config.",
    "^@.* IDENTIFICATION HAS CHANGED": "its host key has changed. If the host was really replaced, run `ssh-keygen -R "
    "{host}` and connect to it once by hand.",
    "^@.* REVOKED HOST KEY": "its host key is revoked. Ask the administrator of {host}.",
    "^Host key verification failed": "its host key is unknown. Run `ssh {host}` once to accept it.",
    r"^(\S+@\S+: )?Permission denied \([^)]*(password|keyboard)": "ssh asks for a password. Copy your key: "
    "`ssh-copy-id {host}`",
    r"^(\S+@\S+: )?Permission denied \(": "its sshd accepts none of your keys. Add one to ~/.ssh/authorized_keys "
    "there, or pass --ssh-option User=NAME.",
    "^Received disconnect from .*Too many authentication failures": "ssh offers too many keys. Name one: --ssh-option "
    "IdentitiesOnly=yes --ssh-option IdentityFile=KEY",
    "^Permissions .* are too open": "ssh ignores a private key that others can read. Run `chmod 600` on the key.",
    "Bad configuration option|Bad owner or permissions": "ssh rejects its configuration. Correct ~/.ssh/config, or the "
    "--ssh-option.",
    "[Yy]our account has expired|Account is (locked|expired)": "your account there has expired or is locked. Ask the "
    "administrator of {host}.",
    "pam_slurm|no active jobs on this node": "it admits only users with a Slurm job there. Start inside a job of that "
    "node.",
    "[Ss]ystem is (booting up|going down)|[Uu]nprivileged users are not permitted": "it admits no users while it "
    "starts or stops. Wait a minute, or leave it out.",
    "^Unable to negotiate with": "ssh and the sshd of {host} share no method. Update the older one, or allow the "
    "method that it offers with --ssh-option.",
    r"^(ssh|channel \d+|Connection|kex_|banner exchange).* timed out|^Timeout, server .* not responding": "ssh to "
    "{host} timed out. Check that the host is up and sshd is running.",
    r"^(ssh|channel \d+): .*(No route to host|Host is down)": "no route to {host}. Check that the host is up.",
    "^ssh: .*Network is unreachable": "the network of {host} is unreachable from this machine",
    "^(ssh|kex)_exchange_identification: |^Connection (closed|reset) by|^client_loop: "
    "|^Connection to .* closed by remote host": "its sshd closed the connection. Check its "
    "log, MaxStartups and /etc/hosts.deny there.",
}
TROUBLES = {
    "^hvdlaunch: (error: )?(?P<text>.+)": "{text}",  # first: it may quote any of the others
    "Invalid node name": "it is not a node of this Slurm allocation. Name one of its nodes, or pass --ssh-option "
    "BatchMode=yes to use ssh.",
    "node configuration is not available|nodes are busy|required by task is not available": "it is not a node of this "
    "Slurm allocation, or has too few free cores, memory or GPUs for a step. Compare `scontrol show job -d`, or "
    "pass --ssh-option BatchMode=yes to use ssh.",
    "Insufficient GRES|Invalid generic resource": "this job has fewer GPUs there than on this node. Request equally "
    "many on each, with --gpus-per-node.",
    r"Invalid job id|already completing|job \d+ has expired": "the Slurm job of this shell has ended. `unset "
    "SLURM_JOB_ID`, or start inside a running job.",
    "oom.kill|[Oo]ut [Oo]f [Mm]emory|^MemoryError|Cannot allocate memory": "its memory is used up. Raise the memory "
    "limit of the job or the login there, or free some.",
    "Password change required|password has expired": "your password there has expired. Run `ssh {host}` once to change "
    "it.",
    "positional arguments but|cannot import name .* from 'launch": "it has an older version of the project. Install "
    "the same version there.",
    r"No module named '?launch\b": "{python} cannot import hvdlaunch. Install the same version there.",
    "^[Uu]nknown option:? -P|^ModuleNotFoundError: No module named 'dataclasses'": "{python} is older than Python "
    "3.11. Install the same version there.",
    "^ModuleNotFoundError: No module named 'encodings'": "{python} does not find its standard library. Unset "
    "PYTHONHOME there, or install Python at the same path.",
    "error while loading shared libraries: (?P<text>[^:]+)": "{text}, a library of {python}, is missing. Add its "
    "folder to LD_LIBRARY_PATH in ~/.bashrc of {host}, or install it there.",
    "version [`'](?P<text>[^']+)' not found": "its system is older than {python}, which needs {text}. Install the "
    "project there for that system.",
    r"\bcd\b.*FOLDER'?:? ?(No such file or directory)?$|^FOLDER: No such file": "{folder} does not exist on {host}. "
    "Mount it there, or start from a directory both hosts have.",
    r"\bcd\b.*FOLDER|^FOLDER: ": "{folder} cannot be entered on {host}. Check its rights and its mount there.",
    "(?i)PYTHON: .*permission denied|permission denied: PYTHON": "{python} may not be executed on {host}. Check the "
    "rights of the file and of its folders, and whether they are mounted noexec.",
    "(?i)PYTHON.*(cannot execute binary|exec format error|bad interpreter|required file)": "{python} is built for "
    "another system or CPU. Install the project there for that of {host}.",
    "^PermissionError: .*: '(?P<text>.+)'": "this user may not read {text}. Correct the rights there.",
    r"^OSError: \[Errno (5|116|121)\]": "its disk or a shared file system does not work. Check its mounts and `dmesg`.",
    "(?i)PYTHON.*(not found|no such file|does not exist)|(not found|no such file.*|unknown command): PYTHON": ""
    "{python} does not exist. Install the project on {host} at the same path.",
}
# Last lines that only count or close.
EPILOGUE = re.compile(
    r"srun: (error: .*task.*: (Exited with|Killed)|(Force )?Terminat)|slurmstepd: error: \*\*\*"
    r"|Current thread 0x|\s+File |<no Python frame>|(Shared connection|Connection) to \S+ closed\.|Disconnected from"
    r"|Killed by signal"
)


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """The way to reach other hosts, for hvdlaunch itself and for mpirun."""

    agent: tuple[str, ...] = ("ssh",)  # the program and its arguments
    options: tuple[str, ...] = ()  # the user's, KEY=VALUE
    silence_s: float = SILENCE_S  # a shorter silence of a host never ends anything

    @property
    def sign_every_s(self) -> int:
        """The seconds between two keepalives on an idle link: a silence ends after 4 or 5 times as long."""
        return math.ceil(self.silence_s / UNANSWERED)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options as arguments; ssh uses the first value of an option, so the user's take precedence."""
        alive = (f"ServerAliveInterval={self.sign_every_s}", f"ServerAliveCountMax={UNANSWERED}")
        ours = (*STRICT, *alive) if PurePath(self.agent[0]).name == "ssh" else ()  # other programs have other options
        return tuple(word for option in (*self.options, *ours) for word in ("-o", option))

    def ask(self, host: str, words: Sequence[str], folder: str, *, mark: str, timeout_s: float) -> str:
        """Run a program on a host in `folder`; return its last line after the mark, or raise HostError without one.

        The error's details are the last lines of the output, unless the error itself quotes all that matters.
        """
        try:
            answer = ask(self.command(host, words, folder), timeout_s=timeout_s)
        except ProcessError as error:
            raise HostError(f"host {host}: {error}", error.details[-MAX_DETAILS:]) from error
        # A profile may have printed a terminal's title before it, without the end of a line.
        lines = [line.partition(mark)[2] for line in answer.out.splitlines() if mark in line]
        if answer.status or not lines:
            why = explain_failure(answer, host=host, python=words[0], folder=folder)
            text = output(answer)
            quoted = not text or text[-1].endswith(why) or (len(text) == 1 and why.endswith(text[0]))
            raise HostError(f"host {host}: {why}", () if quoted else text[-MAX_DETAILS:])
        return lines[-1]

    def command(self, host: str, words: Sequence[str], folder: str) -> list[str]:
        """Return the command that runs a program on a host in `folder`."""
        return [*self.agent, *self.arguments, host, f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"]

    def reaches(self, host: str) -> bool:
        """Return whether a host responds at all."""
        with contextlib.suppress(ProcessError):
            return ask([*self.agent, *self.arguments, host, "true"], timeout_s=REACH_TIMEOUT_S).status == 0
        return False


SSH = Ssh()


def agent_of(
    parameters: Sequence[Parameter], environment: Mapping[str, str], options: Sequence[str]
) -> tuple[str, ...]:
    """Return the program that reaches hosts, with its arguments: the one set by the user for Open MPI, or ssh.

    In a Slurm allocation it is srun, since ssh may be forbidden, unless the user has `options` for ssh.
    """
    agents = chosen_agent(parameters)
    if agents is None:
        return srun.AGENT if srun.inside(environment) and not options else SSH.agent
    programs = [tuple(program.split()) for program in agents.value.split(":") if program.strip()] or [SSH.agent]
    return next((program for program in programs if find(program[0])), programs[0])


def chosen_agent(parameters: Sequence[Parameter]) -> Parameter | None:
    """Return the parameter by which the user names the agents; None if there is none."""
    return first([each for each in parameters if not each.value.startswith(NO_CHOICE)], AGENTS)


def output(answer: Answer) -> list[str]:
    """Return the lines that tell why a program failed: standard error, or else standard output."""
    lines = [line.rstrip() for line in (answer.err.strip() or answer.out.strip()).splitlines() if line.strip()]
    while len(lines) > 1 and EPILOGUE.match(lines[-1]):
        lines.pop()
    return lines


def explain_failure(answer: Answer, *, host: str, python: str, folder: str) -> str:
    """Explain a failure in one line: by whom the status is, ssh, a signal or the rest, and by what that one printed."""
    lines = output(answer)
    last = lines[-1] if lines else f"ended with status {answer.status} without a word"
    if answer.status < 0 or 128 < answer.status < SSH_FAILED:
        number = -answer.status if answer.status < 0 else answer.status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        advice = f"Run `{python} -V` there, and see `dmesg`."
        advice = f"Check the memory limit and `dmesg` of {host}." if number == signal.SIGKILL else advice
        return f"the probe was killed by {name}. {advice}"
    names = (last, python, folder, "launch", "srun: ", "slurmstepd: ", "option -P")
    tables = [(TROUBLES, [line for line in lines if any(name in line for name in names)])]
    if answer.status == SSH_FAILED:
        tables.insert(0, (SSH_TROUBLES, lines))
    for table, heard in tables:
        text = "\n".join(heard)
        for pattern, meaning in table.items():
            known = pattern.replace("PYTHON", re.escape(python)).replace("FOLDER", re.escape(folder) + r"(?![\w/.-])")
            if match := re.search(known, text, re.MULTILINE):
                return meaning.format(host=host, python=python, folder=folder, **match.groupdict())
    return f"the probe failed: {last}"
