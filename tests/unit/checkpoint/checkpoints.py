"""Checkpoints whose content depends on their step."""

import os
import signal
from types import SimpleNamespace

import torch
from torch import nn

from hvdtrain.checkpoint.files import load, write
from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import State
from hvdtrain.core.position import Position
from hvdtrain.loop.save_points import NEVER
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.faults import NONE
from hvdtrain.settings.safety.guard import Guard
from hvdtrain.settings.safety.watchdog import OFF


def documents(step, kib=8):
    """As the only rank's."""
    return {
        "state": {"model": {"weight": torch.full((kib * 256,), float(step))}, "lr": 0.1},
        "ranks/0": {"buffers": [{"step": torch.tensor([step])}]},
    }


def put(root, *steps, kib=8):
    return [write(root, step, documents(step, kib), metadata={"epoch": step}) for step in steps]


def is_whole(found, step):
    """Whether it is the checkpoint of this step that `put` or `Small` has written."""
    weights, buffers = load(found, "state")["model"]["weight"], load(found, "ranks/0")["buffers"]
    return (found.step, found.metadata["epoch"], buffers) == (step, step, [{"step": torch.tensor([step])}]) and bool(
        (weights == step).all()
    )


def folder_of(path, *, newest=None, apart=(), metadata=None):
    """An open run folder, of a run that resumes from step `newest`."""
    resume_from = None if newest is None else SimpleNamespace(step=newest)
    return RunFolder(path=path, lock=None, apart=apart, resume_from=resume_from, metadata=metadata or {}, changes=[])


def record_of(tracker=None, *, faults=NONE):
    return SimpleNamespace(tracker=tracker or SimpleNamespace(guard=Guard(), memory=dict), watch=OFF, faults=faults)


class Small(Saves):
    """The checkpoints of one rank with a small model; it keeps a list of the steps it has committed."""

    def __init__(self, root, *, keep=2, newest=None, comm=None, apart=()):
        """`root` is a run's folder checkpoints."""
        self.steps = []
        self.model = nn.Module()
        self.model.register_buffer("step", torch.tensor([0]))
        parts = State(
            averaged_buffers=lambda _: ["rank"],
            comm=comm or SerialComm(), device=torch.device("cpu"), seed=0, model=self.model, average=None,
            optimizer=SimpleNamespace(
                state_dict=lambda: {"state": {}}, load_state_dict=dict, state={}, param_groups=[]
            ),
            shared={}, per_rank={},
        )  # fmt: skip
        folder, step = folder_of(root.parent, newest=newest, apart=apart), SimpleNamespace(evaluated=self.model)
        super().__init__(step, parts, folder, record_of(), NEVER, keep=keep)
        self.fill(0)

    def fill(self, step, kib=8):
        self._metadata["epoch"] = step
        self.model.weight = nn.Parameter(torch.full((kib * 256,), float(step)))
        self.model.step.fill_(step)

    def begin(self, step, kib=8):
        """Save, though it is the step that was saved last, and do not wait for the thread."""
        self.fill(step, kib)
        self.save(Position(step=step))

    def all(self, *steps, kib=8):
        for step in steps:
            self.begin(step, kib)
        self.wait(0)

    def best(self, step, kib=8):
        self.fill(step, kib)
        self.save_best(Position(step=step))

    @property
    def counts(self):
        return self.run.tracker.guard.counts

    def _record_commit(self, step):
        super()._record_commit(step)
        self.steps.append(step)


def files_under(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left(folder):
    """What is in a run folder, but for its lock."""
    return {name: content for name, content in files_under(folder).items() if name != "lock"}


def names(root):
    return sorted(path.name for path in root.iterdir())


# The os functions that write a checkpoint.
CALLS = ("open", "write", "fsync", "close", "mkdir", "rename")


def break_call(monkeypatch, name, number, *, first, last=10**9):
    """Make the calls `first` to `last` of an os function fail, or kill this process if `number` is None.

    Other calls of os.write take at most 3000 bytes.
    """
    original, calls = getattr(os, name), []

    def call(*arguments, **options):
        calls.append(arguments)
        if first <= len(calls) <= last:
            if number is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(number, os.strerror(number))
        if name == "write":
            arguments = arguments[0], arguments[1][:3000]
        return original(*arguments, **options)

    monkeypatch.setattr(os, name, call)
    return calls
