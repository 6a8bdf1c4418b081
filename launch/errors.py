"""What can go wrong before, while and after ranks are started.

LaunchError             one line that names what, where and the remedy; hvdlaunch ends with its status, 2
├── HostfileError       a list of hosts that cannot be read; names the file and the line
├── TopologyError       a text or a driver that does not say how the GPUs are connected
├── SelectionError      so many GPUs cannot be chosen
├── PlacementError      ranks that do not fit on the hosts
├── CommandError        a command that cannot be carried out as it is given
├── ProcessError        a program that is missing, fails or does not answer
└── HostError           a host that cannot be reached, or lacks what a run needs
"""

from collections.abc import Sequence


class LaunchError(Exception):
    """One line that names what is wrong, where, and the remedy."""

    status = 2

    def __init__(self, line: str, details: Sequence[str] = ()) -> None:
        super().__init__(line)
        self.details = tuple(details)  # lines to be shown below it, as the whole of what ssh wrote


class HostfileError(LaunchError):
    """A list of hosts that cannot be read."""


class TopologyError(LaunchError):
    """A text or a driver that does not say how the GPUs are connected."""


class SelectionError(LaunchError):
    """So many GPUs cannot be chosen."""


class PlacementError(LaunchError):
    """Ranks that do not fit on the hosts."""


class CommandError(LaunchError):
    """A command that cannot be carried out as it is given."""


class ProcessError(LaunchError):
    """A program that is missing, fails or does not answer."""


class HostError(LaunchError):
    """A host that cannot be reached, or lacks what a run needs."""


def in_one_line(error: LaunchError) -> str:
    """An error as one line for a terminal."""
    return harmless(" ".join(str(error).split()))


def harmless(text: str) -> str:
    """The text, which may be a stranger's, with all escaped that moves the cursor, ends the line or cannot be seen."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
