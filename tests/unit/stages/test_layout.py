from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from hvdtrain.stages.layout import Stages
from tests.ranks import Rank


class Stage(Rank):
    """Rank `rank` of a replica of so many stages."""

    def __init__(self, rank, stages):
        super().__init__(rank, stages)
        self._place = rank, stages

    @property
    def replica(self):
        return Rank(*self._place)


def trained(rank, stages, model, images):
    """A stage that has taken two steps, of micro-batches with so many images each; it hands on six floats of each."""

    def train(count, *, forward, loss, make_buffer):
        for number in range(count):
            forward(number, None)
            if stage.is_last:
                loss(number, torch.zeros(()))

    stage = SimpleNamespace(
        is_last=rank == stages - 1,
        starts=tuple(range(stages)),
        pipeline=SimpleNamespace(train=train),
        run=lambda _, __, inputs: torch.zeros(len(inputs[0]), 6),
        counted_before=lambda _: set(),
        sum_tied=lambda model, tensors_of: [values.add_(0) for values in tensors_of(model.weight)],
    )
    where = Stages(Stage(rank, stages), stage, model)
    where._samples = SimpleNamespace(of=lambda _, read, __: read(), finish=lambda: None)
    step = SimpleNamespace(
        model=model,
        task=None,
        device=None,
        enter=lambda _: None,
        context=lambda _: nullcontext(),
        inputs=lambda batch: (batch["images"],),
        loss=lambda *_, **__: {},
        record_loss=lambda *_: torch.zeros(()),
        hand_on=lambda outputs: outputs,
    )
    for _ in range(2):
        where.train(step, [{"images": torch.zeros(count, 1)} for count in images], len(images), 1.0)
        where.sum_tied(model, lambda parameter: [parameter.detach()])
    return where


def test_what_stages_exchange_in_a_step_is_counted():
    model = nn.Linear(5, 2, bias=False)
    assert trained(0, 3, model, [4, 4, 3]).sent_bytes() == ({1: 4 * 6 * 11, 2: 4 * 10}, 0)
    assert trained(1, 3, model, [4, 4, 3]).sent_bytes() == ({2: 4 * 6 * 11}, 0)
    assert trained(2, 3, model, [4, 4, 3]).sent_bytes() == ({}, 0)
    assert trained(0, 2, model, [4, 4, 3]).sent_bytes() == ({1: 4 * 6 * 11 + 4 * 10}, 0)
