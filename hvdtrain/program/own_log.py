"""Numbers and pictures that a program records at the current step."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from hvdtrain.insight.tracking.run import TrackedRun
from hvdtrain.loop.own_state import OwnState

# Names of hvdtrain's own curves begin like this; a value of the same name would be a second one at its step.
_RESERVED = ("train/", "eval/", "train_by_epoch/", "train_by_rank/", "usage/")
_KEYS = ("step", "seconds", "epoch", "event", "phases")
_CHANNELS = (1, 3, 4)


class OwnLog:
    """Records on rank 0; a mistake ends all ranks after the current item of the loop."""

    def __init__(self, record: TrackedRun, own: OwnState, step: Callable[[], int]) -> None:
        self._record, self._own, self._step = record, own, step
        self._repeated: set[str] = set()  # names with several values at a step, each of which is printed once

    def number(self, name: str, value: Any) -> None:
        """Record a value of a curve."""
        self._record_content("log", name, lambda: as_number(value))

    def image(self, name: str, image: Any) -> None:
        """Record a picture."""
        is_writer = self._record.tracker.is_writer
        self._record_content("log_image", name, lambda: to_png(image) if is_writer else b"")

    def _record_content(self, call: str, name: str, convert: Callable[[], float | bytes]) -> None:
        subject, step, record = f"training.{call} {name!r}", self._step(), self._record
        if record.is_concluded:
            line = f"{subject}: the run has ended, so it is not recorded. Call it in the loop, or in at_end."
            record.console.print_message("warning", line)
            return
        try:
            require_name(name)
            if not record.tracker.log(name, step, convert()) and name not in self._repeated:
                self._repeated.add(name)
                line = f"{subject}: step {step} has a value already, which stays. Call it for each EpochDone only."
                record.console.print_message("warning", line)
        except (ValueError, OSError) as error:  # PNG cannot hold an image in CMYK
            self._own.problem = self._own.problem or f"{subject}: {error}."


def require_name(name: Any) -> None:
    """Raise ValueError, with the remedy, for a name that cannot be a curve of the program's own."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError("the name must be a printable text")
    if name in _KEYS or name.startswith(_RESERVED):
        raise ValueError("hvdtrain has curves of this name. Choose another, for example own/...")


def as_number(value: Any) -> float:
    """Return the value of a curve; ValueError for what is not one number."""
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"a {type(value).__name__} is not a number. Pass a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"a {type(value).__name__} that is not one number. Pass a number") from error


def to_png(image: Any) -> bytes:
    """Return a picture as PNG; ValueError for what is none.

    A picture is a figure of matplotlib, an image of PIL, or a tensor or an array, (H, W), (C, H, W) or (H, W, C) with 1
    or 3 channels, of floats from 0 to 1, bools, or bytes.
    """
    buffer = io.BytesIO()
    if hasattr(image, "savefig"):
        image.savefig(buffer, format="png", bbox_inches="tight")
    else:
        picture = image if isinstance(image, Image.Image) else Image.fromarray(_as_bytes(image))
        picture.save(buffer, format="png")
    return buffer.getvalue()


def _as_bytes(image: Any) -> np.ndarray[Any, Any]:
    """Return (H, W) or (H, W, C) bytes."""
    array = image.detach().float().cpu() if isinstance(image, torch.Tensor) and image.is_floating_point() else image
    pixels = np.asarray(array.cpu() if isinstance(array, torch.Tensor) else array)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or (pixels.ndim == 3 and pixels.shape[2] not in _CHANNELS):
        raise ValueError(f"{pixels.shape} is not a picture. Pass (H, W), (1, H, W), (3, H, W) or (H, W, 3)")
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind not in "fb":
            raise ValueError(f"{pixels.dtype} pixels. Convert them to floats from 0 to 1, or to uint8")
        pixels = np.nan_to_num(255 * pixels.astype(np.float32)).clip(0, 255).round().astype(np.uint8)
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
