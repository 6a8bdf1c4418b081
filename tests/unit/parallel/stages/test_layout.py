import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.core.blocks import Cuts, blocks_of
from hvdtrain.core.phases import OFF
from hvdtrain.core.task import Sums, Task
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.parallel.stages import layout
from hvdtrain.parallel.stages.cut import Passage, require_parameters
from hvdtrain.parallel.stages.layout import Stages, make_stages
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import CPU, step_of

from .test_blocks import MODELS

PASSAGE = Passage(time_ms=1.0, trailing_shape=[], dtype="torch.float32", memory_format="torch.contiguous_format")


class Replica(Rank):
    """Stage `index` of the only replica, in which each other stage holds these parameters."""

    replica = property(lambda self: self)

    def __init__(self, index, stages, *others):
        super().__init__(index, stages, answers=lambda own: [own if at == index else [*others] for at in range(stages)])


def stage_of(index, model, blocks, cuts, *others, pipeline=None, shape=()):
    job = SimpleNamespace(comm=Replica(index, 1 + len(cuts), *others), model=model, cuts=Cuts(blocks=blocks))
    passages = [replace(PASSAGE, trailing_shape=[*shape])] * len(blocks)
    return Stages(job, cuts, passages, pipeline, recompute=False)


class OneStage:
    """The pipeline of a single stage."""

    def run(self, count, *, forward, make_buffer, loss=None):
        for number in range(count):
            outputs = forward(number, None)
            if loss is not None:
                loss(number, outputs).backward()


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
    where = stage_of(0, model, blocks_of(model), [], pipeline=OneStage())
    step = step_of(model, task=task, where=where, witnesses=[])
    step([batch], backward_passes=1, global_count=4.0, lr=0.0)
    evaluate(step, Resident(**batch), 1, micro_batch=4)
    assert task.modes == {(True, True, 2), (False, False, 2)}


@pytest.mark.parametrize(
    ("kind", "cut", "precision", "shape"),
    [
        ("effnet", 2, torch.float32, [16, 16, 16]),
        ("effnet", 1, torch.bfloat16, [16, 16, 16]),
        ("classify", 2, torch.bfloat16, [128]),
    ],
)
def test_a_cut_changes_no_bit_of_a_gradient(kind, cut, precision, shape):
    model, blocks, inputs = MODELS[kind]()
    parts = [copy.deepcopy(model) for _ in range(2)]

    def run(index, part, cuts, received=None):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            return stage_of(index, part, blocks, cuts, shape=shape)._run(part, received, inputs)

    run(0, model, []).square().sum().backward()
    sent = run(0, parts[0], [cut])
    received = sent.detach().requires_grad_()  # as it comes from another rank
    run(1, parts[1], [cut], received).square().sum().backward()
    sent.backward(received.grad)
    gradients = {name: one.grad for part in parts for name, one in part.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(gradients[name], one.grad) for name, one in model.named_parameters())
    shape[0] += 1
    assert "--stages: an output of" in refused(lambda: run(0, parts[0], [cut]))


def test_a_stage_without_parameters_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    require_parameters(model, blocks_of(model), [2])
    line = refused(lambda: require_parameters(model, blocks_of(model), [1, 2]))
    assert "--stages 0,1,2: the stage that begins with block 1 (1) has no parameters" in line


def test_a_parameter_of_two_stages_is_counted_once():
    tied = "bert.embeddings.word_embeddings.weight"
    model, blocks, _ = MODELS["mlm"]()
    ends = [copy.deepcopy(model) for _ in range(2)]
    first, last = (stage_of(index, ends[index], blocks, [2], tied) for index in range(2))
    assert first.part.counted_before == set()
    assert last.part.counted_before == {id(ends[1].get_parameter(tied))}
    assert stage_of(1, model, blocks, [1, 2]).part.counted_before == set()


@pytest.mark.parametrize(
    ("cuts", "recorded", "cut"),
    [([6], [5], [6]), (None, [5], [5]), (None, [2, 5], [3])],  # three stages have saved the last: cut anew
)
def test_stages_are_cut_as_asked_or_as_in_the_checkpoint_of_as_many(monkeypatch, cuts, recorded, cut):
    monkeypatch.setattr(layout, "join_replica_on_all", lambda *_, **__: None)
    monkeypatch.setattr(layout, "choose_cuts", lambda *_: [3])
    model, blocks, inputs = MODELS["effnet"]()
    job = SimpleNamespace(
        comm=Replica(0, 2),
        cuts=Cuts(blocks=blocks),
        resumed={"stages_at": recorded},
        device=CPU,
        is_shared=True,
        precision="fp32",
        model=model,
        example=lambda: inputs,
        phases=OFF,
    )
    assert make_stages(job, cuts=cuts, order="1f1b", recompute=False).metadata == {"stages_at": cut}
