"""Checkpoints whose content depends on their step."""

import os

import torch

from hvdtrain.checkpoint.files import load, write


def documents(step, kib=8):
    return {"state": {"weights": torch.full((kib * 256,), float(step)), "lr": 0.1}, "ranks": [torch.tensor([step])]}


def put(root, *steps, kib=8):
    return [write(root, step, documents(step, kib), about={"epoch": step}) for step in steps]


def is_whole(found, step):
    """Whether it is the checkpoint of this step that `put` has written."""
    weights, ranks = load(found, "state")["weights"], load(found, "ranks")
    return (found.step, found.about, ranks) == (step, {"epoch": step}, [torch.tensor([step])]) and bool(
        (weights == step).all()
    )


def files_under(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(root):
    return sorted(path.name for path in root.iterdir())


# The os functions that write a checkpoint.
CALLS = ("open", "write", "fsync", "close", "mkdir", "rename")


def break_call(monkeypatch, name, number, *, first, last=10**9):
    """Make the calls `first` to `last` of an os function fail; other calls of os.write take at most 3000 bytes."""
    original, calls = getattr(os, name), []

    def call(*arguments, **options):
        calls.append(arguments)
        if first <= len(calls) <= last:
            raise OSError(number, os.strerror(number))
        if name == "write":
            arguments = arguments[0], arguments[1][:3000]
        return original(*arguments, **options)

    monkeypatch.setattr(os, name, call)
    return calls
