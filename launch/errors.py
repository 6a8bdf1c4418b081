"""Errors before, during and after the start of ranks.

LaunchError             one line that names what, where and the remedy; hvdlaunch ends with its status, 2
├── HostfileError       a host list that cannot be read; names the file and the line
├── TopologyError       text or driver output that does not describe how the GPUs are connected
├── SelectionError      a number of GPUs that cannot be selected
├── PlacementError      ranks that do not fit on the hosts
├── CommandError        a command that cannot be carried out as given
├── ProcessError        a program that is missing, fails or does not respond
└── HostError           a host that cannot be reached, or lacks what a run needs
"""

from collections.abc import Sequence


class LaunchError(Exception):
    """An error in one line that names what is wrong, where, and the remedy."""

    status = 2

    def __init__(self, line: str, details: Sequence[str] = ()) -> None:
        super().__init__(line)
        self.details = tuple(details)  # further lines to print, for example the complete output of ssh


class HostfileError(LaunchError):
    """A host list that cannot be read."""


class TopologyError(LaunchError):
    """Text or driver output that does not describe how the GPUs are connected."""


class SelectionError(LaunchError):
    """A number of GPUs that cannot be selected."""


class PlacementError(LaunchError):
    """Ranks that do not fit on the hosts."""


class CommandError(LaunchError):
    """A command that cannot be carried out as given."""


class ProcessError(LaunchError):
    """A program that is missing, fails or does not respond."""


class HostError(LaunchError):
    """A host that cannot be reached, or lacks what a run needs."""


def in_one_line(error: LaunchError) -> str:
    """Format an error as one line for a terminal."""
    return harmless(" ".join(str(error).split()))


def harmless(text: str) -> str:
    """Escape characters of untrusted text that move the cursor, end the line or are invisible."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
