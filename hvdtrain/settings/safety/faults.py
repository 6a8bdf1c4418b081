"""Injected faults for testing recovery, enabled only by the variable HVDTRAIN_FAULT.

    HVDTRAIN_FAULT=kill@rank1:step7                     rank 1 kills itself before the work of step 7
    HVDTRAIN_FAULT=nan@rankall:step3,stop@rank0:save2   several, separated by commas

Places are `start` (before the first step), `stepN` (before its work), `saveN` (in the N-th checkpoint of this process)
and `evalN` (in its N-th evaluation). Each fault fires once, and only in the first attempt of a run.
"""

import collections
import ctypes
import itertools
import math
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from torch import nn

VARIABLE = "HVDTRAIN_FAULT"

Place = Literal["start", "step", "save", "eval"]
Kind = Literal[
    "kill",  # sends itself SIGKILL
    "term",  # sends itself SIGTERM
    "stop",  # sends itself SIGSTOP
    "raise",  # raises RuntimeError
    "segv",  # reads address 0
    "exit3",  # exits immediately with status 3
    "gil",  # loops without ever releasing the GIL
    "sleep",  # hangs in Python
    "oom",  # allocates memory until it is killed or gets a MemoryError
    "nan",  # the step's loss becomes NaN
    "spike",  # the loss, and so its gradients, are multiplied by 1000, or by 3 with spike:3
    "bitflip",  # flips the sign of one weight
]

_STEP_FAULTS = ("nan", "spike", "bitflip")
_FACTORS = {"nan": math.nan, "spike": 1000.0}  # multiply the loss
_SPELLING = re.compile(
    rf"({'|'.join(get_args(Kind))})(?:(?<=spike):(\d+(?:\.\d+)?))?@rank(all|0|[1-9]\d*):(start|(step|save|eval)([1-9]\d*))"
)
_HOARD_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of this rank."""

    spelling: str  # as written in the variable
    kind: Kind
    place: Place
    number: int  # from 1; 0 at the start
    factor: float = 1.0  # of the loss


class Faults:
    """The faults of one rank that have not fired yet."""

    def __init__(self, announcement: str | None, pending: tuple[Fault, ...]) -> None:
        self.announcement = announcement  # a warning, from one rank; None if no rank has faults
        self._pending = list(pending)

    @classmethod
    def parse(cls, environment: Mapping[str, str], rank: int) -> "Faults":
        """Parse the faults of this rank; return NONE without the variable and after a restart.

        Raises BadInput on all ranks if the syntax is wrong.
        """
        text = environment.get(VARIABLE, "")
        if not text:
            return NONE
        faults = tuple(fault for word in text.split(",") for fault in _faults_of_rank(rank, word.strip()))
        if fact(environment, "restart", 0):
            return NONE
        return cls(f"{VARIABLE}={text}: faults are injected into this run.", faults)

    def inflict_at(self, place: Place, number: int = 0, *, model: "nn.Module | None" = None) -> None:
        """Inject the faults of this place; most kinds do not return. Steps need the `model`."""
        for fault in self._due_faults(place, number):
            if fault.kind not in _FACTORS:
                self._pending.remove(fault)
                _inflict(fault, model)

    def loss_factor(self, step: int) -> float:
        """Return the factor by which faults multiply this rank's loss of this step; call it once per step."""
        faults = [fault for fault in self._due_faults("step", step) if fault.kind in _FACTORS]
        self._pending = [fault for fault in self._pending if fault not in faults]
        return math.prod(fault.factor for fault in faults)

    def _due_faults(self, place: Place, number: int) -> list[Fault]:
        return [fault for fault in self._pending if (fault.place, fault.number) == (place, number)]


NONE = Faults(None, ())


def _faults_of_rank(rank: int, word: str) -> list[Fault]:
    match = _SPELLING.fullmatch(word)
    if match is None:
        raise BadInput(
            f"{VARIABLE}: {word!r} is not a fault. Write KIND@rankR:PLACE, with KIND one of "
            f"{', '.join(get_args(Kind))}, R a number or all, PLACE start, stepN, saveN or evalN with N from 1; "
            "for example kill@rank1:step7."
        )
    kind, factor, rank_text, start, place, number = match.groups()
    if kind in _STEP_FAULTS and place != "step":
        raise BadInput(f"{VARIABLE}: {word!r}: {kind} is a fault of a step. Write {kind}@rank{rank_text}:stepN.")
    if rank_text not in ("all", str(rank)):
        return []
    return [
        Fault(
            spelling=word,
            kind=cast("Kind", kind),
            place=cast("Place", place or start),
            number=int(number or 0),
            factor=float(factor or _FACTORS.get(kind, 1.0)),
        )
    ]


def _inflict(fault: Fault, model: "nn.Module | None") -> None:
    match fault.kind:
        case "kill" | "term" | "stop":
            os.kill(os.getpid(), signal.Signals[f"SIG{fault.kind.upper()}"])
        case "raise":
            raise RuntimeError(f"injected fault {fault.spelling}")
        case "segv":
            ctypes.string_at(0)
        case "exit3":
            os._exit(3)
        case "gil":
            collections.deque(itertools.repeat(None), maxlen=0)  # a loop in C: Python cannot even handle signals
        case "sleep":
            while True:
                time.sleep(3600)
        case "oom":
            hoard = []
            while True:
                hoard.append(bytearray(_HOARD_BYTES))
        case "bitflip":
            assert model is not None
            weights = next(model.parameters()).detach()
            weights[(0,) * weights.dim()].neg_()  # its sign bit
