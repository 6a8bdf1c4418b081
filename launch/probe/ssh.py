"""Runs commands on other hosts over ssh or a replacement, and explains failures.

The replacement for Slurm is launch.probe.srun.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from launch.errors import HostError, ProcessError
from launch.probe import srun
from launch.process import Answer, ask, find

# No prompts and no unknown host keys.
STRICT = ("BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=5")
# Open MPI's variables: programs separated by ":"; the first that exists is used.
AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
SILENCE_S = 30.0
UNANSWERED = 4  # consecutive keepalives without a reply on a dead link
REACH_TIMEOUT_S = 4.0  # to find out whether a host is reachable
SSH_FAILED = 255  # status of ssh itself; all others come from the remote program
MAX_DETAILS = 100  # lines

NOT_OURS = (
    "it is not a node of this Slurm allocation. Name one of its nodes, or pass --ssh-option BatchMode=yes to use ssh."
)
# Part of standard error -> the message for the user.
TROUBLES = {
    "hvdlaunch: ": "{last}",  # first: it may quote any of the others
    "Connection refused": "connection refused. Start sshd on {host}, or name another host.",
    "Could not resolve hostname": "unknown host name. Correct -H, or add {host} to /etc/hosts or ~/.ssh/config.",
    "IDENTIFICATION HAS CHANGED": "its host key has changed. If the host was really replaced, run "
    "`ssh-keygen -R {host}` and connect to it once by hand",
    "Host key verification failed": "its host key is unknown. Run `ssh {host}` once to accept it.",
    "Permission denied": "ssh asks for a password. Copy your key: `ssh-copy-id {host}`",
    "timed out": "ssh to {host} timed out. Check that the host is up and sshd is running.",
    "not responding": "ssh to {host} timed out. Check that the host is up and sshd is running.",
    "No route to host": "no route to {host}. Check that the host is up.",
    "Network is unreachable": "the network of {host} is unreachable from this machine",
    "Invalid node name": NOT_OURS,
    "node configuration is not available": NOT_OURS,
    "Invalid job id": "the Slurm job of this shell has ended. `unset SLURM_JOB_ID`, or start inside a running job.",
    "positional arguments but": "it has an older version of the project. Install the same version there.",
    "No module named": "{python} cannot import hvdlaunch. Install the same version there.",
    "cd: ": "{folder} does not exist on {host}. Mount it there, or start from a directory both hosts have.",
    "not found": "{python} does not exist. Install the project on {host} at the same path.",
    "No such file": "{python} does not exist. Install the project on {host} at the same path.",
}


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

        If ssh itself fails, the error's details are its complete output.
        """
        command = f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"
        try:
            answer = ask([*self.agent, *self.arguments, host, command], timeout_s=timeout_s)
        except ProcessError as error:
            raise HostError(f"host {host}: {error}") from error
        lines = [line.removeprefix(mark) for line in answer.out.splitlines() if line.startswith(mark)]
        if answer.status or not lines:
            details = answer.err.strip().splitlines() if answer.status == SSH_FAILED else []
            why = explain_failure(answer, host=host, python=words[0], folder=folder)
            raise HostError(f"host {host}: {why}", details[-MAX_DETAILS:])
        return lines[-1]

    def reaches(self, host: str) -> bool:
        """Return whether a host responds at all."""
        try:
            answer = ask([*self.agent, *self.arguments, host, "true"], timeout_s=REACH_TIMEOUT_S)
        except ProcessError:
            return False
        return answer.status == 0


SSH = Ssh()


def agent_of(environment: Mapping[str, str], options: Sequence[str]) -> tuple[str, ...]:
    """Return the program that reaches hosts, with its arguments: the one set by the user for Open MPI, or ssh.

    In a Slurm allocation it is srun, since ssh may be forbidden, unless the user has `options` for ssh.
    """
    agents = next((environment[name] for name in AGENTS if environment.get(name)), None)
    if agents is None:
        return srun.AGENT if srun.inside(environment) and not options else SSH.agent
    programs = [tuple(program.split()) for program in agents.split(":") if program.strip()] or [SSH.agent]
    return next((program for program in programs if find(program[0])), programs[0])


def explain_failure(answer: Answer, *, host: str, python: str, folder: str) -> str:
    """Explain a failure in one line, from the standard error of ssh or of the remote program."""
    last = (answer.err.strip() or f"ended with status {answer.status} without a word").splitlines()[-1]
    last = re.sub("^hvdlaunch: (error: )?", "", last)
    for sign, meaning in TROUBLES.items():
        if sign in answer.err:
            return meaning.format(
                host=host, python=python, folder=folder, last=re.sub("^hvdlaunch: (error: )?", "", last)
            )
    return f"the probe failed: {last}"
