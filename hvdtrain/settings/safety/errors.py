"""Errors that end a run with a status and one line; `hvdtrain.errors` in a program.

HvdtrainError
├── BadInput                 status 2: input or settings that cannot work
└── EndOfRun                 status and reason: all ranks have agreed to stop
    ├── SkippedStepsError    status 3: too many steps in a row were skipped
    ├── ReplicasDifferError  status 4: the replicas of the model differ
    └── Preempted            status 0: stopped on request, and saved
"""


class HvdtrainError(Exception):
    """A reason to end the run; the message is one line."""


class BadInput(HvdtrainError):  # noqa: N818 (named after the user's input)
    """Input or settings that cannot work; the message is one line that names the field, the value and the remedy.

    >>> def main(run):
    ...     raise hvdtrain.BadInput("--width 0: too small. Pass 1 or more.")
    >>> hvdtrain.start(main, hvdtrain.Settings)
    Traceback (most recent call last):
    SystemExit: 2
    """

    is_agreed = False  # all ranks raise it


class EndOfRun(HvdtrainError):  # noqa: N818 (ends a run, on all ranks together)
    """A reason to stop on which all ranks have agreed; the message is one line."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # for result.json


class SkippedStepsError(EndOfRun):
    """Too many steps in a row were skipped."""


class ReplicasDifferError(EndOfRun):
    """The replicas of the model differ."""


class Preempted(EndOfRun):
    """Stopped on request, and saved."""
