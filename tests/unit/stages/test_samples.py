from collections import deque
from dataclasses import replace

import pytest
import torch

from hvdtrain.core.blocks import Blocks
from hvdtrain.core.task import Task
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.stages.samples import Samples
from hvdtrain.stages.stage import Stage

from .test_blocks import MODELS

CPU = torch.device("cpu")
NAMES = ("tokens", "types", "mask", "places")


class Replica(MpiMembers):
    """One stage's end of the queues between the first stage and the others."""

    def __init__(self, rank, queues):
        self.rank, self.queues = rank, queues

    def send(self, content, to):
        self.queues[to].append(content)

    def receive(self, source):
        return self.queues[self.rank].popleft()

    def wait(self, request):
        pass


class Known(Task):
    targets = ("labels",)

    def inputs(self, batch):
        return tuple(value for name, value in batch.items() if name != "labels")


def stages_of(blocks, starts):
    queues, found = [deque() for _ in starts], []
    for index in range(len(starts)):
        comm = SerialComm()
        comm.__class__ = type("Comm", (SerialComm,), {"replica": Replica(index, queues)})
        stage = Stage(blocks=blocks, starts=starts, passages=(), index=index, pipeline=None)
        found.append((stage, Samples(comm, stage)))
    return found


def unread():
    raise AssertionError("a stage has read samples that it does not use")


def batch_of(inputs):
    named = dict(zip(NAMES, inputs, strict=False))
    return {**named, "labels": torch.tensor([2, 0, 1])}


@pytest.mark.parametrize(
    ("kind", "used", "is_padded"),
    [
        ("effnet", [set(), {"labels"}], True),
        ("mlm", [{"mask"}, {"mask", "places", "labels"}], True),
        ("mlm", [{"mask"}, {"mask", "places", "labels"}], False),
    ],
)
def test_stages_get_what_they_use_and_compute_what_the_whole_computes(kind, used, is_padded):
    model, blocks, inputs = MODELS[kind]()
    if not is_padded:
        inputs = tuple(value[:, :0] if value.dtype == torch.bool else value for value in inputs)
    model.eval()
    batch, hidden, task = batch_of(inputs), None, Known()
    (first, samples), *others = stages_of(blocks, (0, 1, len(blocks) - 1))
    assert samples.of(task, lambda: batch, CPU) is batch
    for block in first.local_blocks:
        hidden = block.run(model, hidden, task.inputs(batch))
    for (stage, samples), names in zip(others, used, strict=True):
        received = samples.of(task, unread, CPU)
        assert [(name, value.shape, value.dtype) for name, value in received.items()] == [
            (name, value.shape, value.dtype) for name, value in batch.items()
        ]
        assert {name for name, value in received.items() if not value.is_meta} == names
        assert all(torch.equal(received[name], batch[name]) for name in names)
        for block in stage.local_blocks:
            hidden = block.run(model, hidden, task.inputs(received))
    assert torch.equal(hidden, model(*inputs))


class Unknown(Known):
    targets = None


def test_a_stage_that_may_use_all_reads_by_itself():
    _, blocks, inputs = MODELS["effnet"]()
    batch = batch_of(inputs)
    first, middle, last = (samples for _, samples in stages_of(blocks, (0, 2, 4)))
    for samples, read in ((first, lambda: batch), (middle, unread), (last, lambda: batch)):
        assert samples.of(Unknown(), read, CPU)["labels"].shape == (3,)
    silent = Blocks(row=tuple(replace(block, uses=None) for block in blocks.row), batch_dims=1)
    for _, samples in stages_of(silent, (0, 4)):
        assert samples.of(Known(), lambda: batch, CPU) is batch
