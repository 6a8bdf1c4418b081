import torch
from torch import nn

from hvdtrain.core.blocks import blocks_of
from hvdtrain.core.task import Sums, Task
from hvdtrain.feed.feed import Resident
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.stages.layout import Stages
from hvdtrain.stages.stage import Stage
from tests.steps import step_of


class OneStage:
    """The pipeline of a single stage."""

    def train(self, count, *, forward, loss, make_buffer):
        for number in range(count):
            loss(number, forward(number, None)).backward()

    def evaluate(self, *, forward, make_buffer):
        forward(0, None)


class Modes(Task):
    """Notes in which mode the model is, by whether the loss is that of training."""

    def __init__(self):
        self.modes = set()

    def loss(self, model, batch, *, training):
        self.modes.add((training, model.training, len(list(model))))
        loss = model(batch["inputs"]).square().sum()
        return Sums(loss=loss, count=loss.new_full((), len(batch["inputs"])))


def test_the_loss_of_the_last_stage_reads_the_models_attributes():
    model, task = nn.Sequential(nn.Linear(3, 2), nn.Dropout()), Modes()
    batch = {"inputs": torch.ones(4, 3)}
    stage = Stage(blocks=blocks_of(model), starts=(0,), passages=(), index=0, pipeline=OneStage())
    step = step_of(model, task=task, where=Stages(SerialComm(), stage, model), witnesses=[])
    step([batch], backward_passes=1, global_count=4.0, lr=0.0)
    evaluate(step, Resident(**batch), 1, micro_batch=4)
    assert task.modes == {(True, True, 2), (False, False, 2)}
