"""The faults of `python bench/run.py faults`, which strike inside a program, once; and notes of what each rank did.

A program calls `begin` first, `step` before each step, `pixels` on each batch, and `end` with the trained model. The
variable FAULT names the fault, FAULT_NOTES the folder of the notes, which no fault touches.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import digits
import numpy as np
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

STEP, SAVED_STEP = 25, 30  # in the third epoch; the step before a save
STEP_S, SLOW_S, LATE_S = 0.05, 0.3, 3.0  # of a step; a slow rank's delay of each; how long a listing is old
WRITTEN_BYTES = 64 * 1024  # of a checkpoint's file of 340 kB or more, when SIGKILL ends its writer
FAULT, NOTES = os.environ.get("FAULT", ""), Path(os.environ["FAULT_NOTES"])
OLD = NOTES / "old"  # the working folder without its newest checkpoint
VARIABLES = ("RANK", "HOROVOD_RANK")
RANK = int(next(os.environ[name] for name in VARIABLES if name in os.environ))  # of the start; 1 is the culprit
SAVES, STRIKES = RANK == 0, RANK == 1
_CLONE_NEWNS = 0x20000
_now = 0  # the step


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _is_due(fault: str) -> bool:
    """Whether this fault has not struck yet; notes the time at which it does."""
    if fault != FAULT:
        return False
    try:
        with (NOTES / "struck").open("x") as note:
            note.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def begin() -> None:
    """A rank that sees an old listing has the old folder mounted over the new one for LATE_S."""
    if STRIKES and _is_due("late"):
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        folder = Path.cwd()
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", OLD, folder], check=True)
        os.chdir(folder)

        def see() -> None:
            subprocess.run(["umount", "-l", folder], check=True)
            os.chdir(folder)

        threading.Timer(LATE_S, see).start()


def data(first: int, last: int) -> TensorDataset:
    """The digits; the copy of one rank may be incomplete."""
    _is_due("data")
    is_short = FAULT == "data" and STRIKES and not (NOTES / "repaired").exists()
    return digits.data(first, last - 128 * is_short)


def step(number: int, collective: Callable[[], object]) -> None:
    """Note the step that begins, 1 being the run's first, and inflict what is due; `collective` is a peer's own."""
    global _now
    _now = number
    with (NOTES / f"rank-{RANK}-{os.getpid()}.steps").open("a") as notes:
        notes.write(f"{number} {time.time()}\n")
    time.sleep(STEP_S)
    if FAULT == "slow" and STRIKES and number > 1:
        _is_due("slow")
        time.sleep(SLOW_S)
    if number == SAVED_STEP and SAVES and _is_due("save"):
        ctypes.CDLL(None).signal(signal.SIGXFSZ, _kill)  # of the write that passes the limit; Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN_BYTES, WRITTEN_BYTES))
    if number != STEP:
        return
    if SAVES and _is_due("disk"):
        with Path("filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
    if not STRIKES:
        return
    if _is_due("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_due("hang"):
        time.sleep(3600)
    if _is_due("extra"):
        collective()


def pixels(batch: Tensor) -> Tensor:
    """The batch of this step, which may be broken."""
    return batch * float("nan") if STRIKES and _now == STEP and _is_due("nan") else batch


def end(model: nn.Module) -> None:
    """Note the trained weights of this rank."""
    weights = parameters_to_vector(model.parameters()).detach().numpy()
    np.save(NOTES / f"rank-{RANK}-{os.getpid()}.npy", weights)
