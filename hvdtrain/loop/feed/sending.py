"""Whether a Dataset can be sent to reader processes, found out before one is started."""

from __future__ import annotations

import ast
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Sending(ForkingPickler):
    """Pickles an object as for a new process, but writes nothing, and passes over the values of tensors and arrays."""

    def __init__(self, value: Any) -> None:
        """Pickle the value; `problem` is why it cannot be sent, and `generators` are those that it holds."""
        self.problem: str | None = None
        self.generators: set[str] = set()
        self._guarded = _names_under_guard()
        with Path(os.devnull).open("wb") as nothing, _as_if_spawning():
            super().__init__(nothing)
            try:
                self.dump(value)
            except Exception as error:  # noqa: BLE001 (of the program's objects)
                self.problem = str(error) or type(error).__name__

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, GENERATORS):
            self.generators.add(type(value).__name__)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return int, ()
        if isinstance(value, Tensor) and (value.is_leaf or not value.requires_grad):
            return int, ()
        if getattr(value, "__module__", None) == "__main__" and getattr(value, "__name__", None) in self._guarded:
            raise ValueError(f'{value.__name__} is defined below `if __name__ == "__main__":`')
        return NotImplemented


def _names_under_guard() -> set[str]:
    """Return the names of the program's file that a reader process, which imports the file, does not have."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return set(vars(sys.modules["__main__"]))
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    guards = [node for node in tree.body if isinstance(node, ast.If) and "'__main__'" in ast.dump(node.test)]
    inside = [node for guard in guards for node in ast.walk(guard)]
    return {node.name for node in inside if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@contextmanager
def _as_if_spawning() -> Iterator[None]:
    """Let locks and file descriptors be pickled, which only a new process can receive."""
    process = SimpleNamespace(DupFd=int, duplicate_for_child=int)
    set_spawning_popen(process)  # type: ignore[arg-type]
    try:
        yield
    finally:
        set_spawning_popen(None)
