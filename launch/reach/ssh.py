"""A question to another host over ssh, and why it got no answer."""

import shlex
from collections.abc import Sequence

from launch.errors import HostError, ProcessError
from launch.process import Answer, ask

# No prompt, no host key that is not known already, no silence without end.
# fmt: off
SSH_OPTIONS = (
    "-o", "BatchMode=yes",
    "-o", "StrictHostKeyChecking=yes",
    "-o", "ConnectTimeout=5",
    "-o", "ServerAliveInterval=2",
    "-o", "ServerAliveCountMax=2",
)
# fmt: on

# Part of a text on standard error -> the line for the user.
TROUBLES = {
    "hvdlaunch: ": "{last}",  # first: it may quote any of the others
    "Connection refused": "ssh is refused: start sshd there, or name another host",
    "Could not resolve hostname": "unknown host name: correct -H, or give it an address in /etc/hosts or ~/.ssh/config",
    "IDENTIFICATION HAS CHANGED": "its host key is not the one in known_hosts: if the host was really replaced, "
    "`ssh-keygen -R {host}` and connect to it once by hand",
    "Host key verification failed": "its host key is unknown: connect to it once by hand, `ssh {host}`, to accept it",
    "Permission denied": "ssh asks for a password: copy a key there, with `ssh-copy-id {host}`",
    "timed out": "ssh gets no answer: see whether the host and its sshd are well",
    "not responding": "ssh gets no answer: see whether the host and its sshd are well",
    "No route to host": "no route to it: see whether the host is up",
    "Network is unreachable": "its network cannot be reached from here",
    "No module named": "{python} there has no hvdlaunch: install the project there as here",
    "cd: ": "it has no folder {folder}: share this folder with the host, or start from one that both have",
    "not found": "it has no {python}: install the project there at the same path as here",
    "No such file": "it has no {python}: install the project there at the same path as here",
}


def ask_over_ssh(host: str, words: Sequence[str], folder: str, *, mark: str, timeout_s: float) -> str:
    """The last line that a program there, started in `folder`, prints behind the mark; HostError if there is none."""
    command = f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"
    try:
        answer = ask(["ssh", *SSH_OPTIONS, host, command], timeout_s=timeout_s)
    except ProcessError as error:
        raise HostError(f"host {host}: {error}") from error
    lines = [line.removeprefix(mark) for line in answer.out.splitlines() if line.startswith(mark)]
    if answer.status or not lines:
        raise HostError(f"host {host}: {why_not(answer, host=host, python=words[0], folder=folder)}")
    return lines[-1]


def why_not(answer: Answer, *, host: str, python: str, folder: str) -> str:
    """Why there was no answer, in one line, by what ssh or the program there wrote to standard error."""
    last = (answer.err.strip() or f"ended with status {answer.status} without a word").splitlines()[-1]
    for sign, meaning in TROUBLES.items():
        if sign in answer.err:
            return meaning.format(host=host, python=python, folder=folder, last=last.removeprefix("hvdlaunch: "))
    return f"asked over ssh, it said: {last}"
