import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.checkpoint import state
from hvdtrain.core.layout import Layout
from hvdtrain.core.phases import OFF
from hvdtrain.core.replicas import check_replicas, parameter_sums
from hvdtrain.parallel.tensor import linear
from hvdtrain.parallel.tensor.layout import Slices
from hvdtrain.parallel.tensor.linear import per_rank_draws, sliced_parameters
from hvdtrain.settings.safety.exits import EndOfRun
from hvdtrain.tasks.text import model as berts
from hvdtrain.tasks.text import settings as texts
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.unit.parallel.stages.test_blocks import bert


class Sums:
    """torch.distributed's sum among ranks that are threads of this process."""

    def __init__(self, ranks):
        self._own = threading.local()
        self._meeting, self._parts = threading.Barrier(ranks, timeout=60), [None] * ranks
        self.count = 0

    def on(self, rank):
        self._own.rank = rank

    def all_reduce(self, values):
        self.count += self._own.rank == 0
        self._parts[self._own.rank] = values.clone()
        self._meeting.wait()
        values.copy_(sum(self._parts))
        self._meeting.wait()


def sliced(kind, ranks):
    """A BERT of two heads, its inputs, and the slices of it."""
    model, _, inputs = bert(kind)
    slices = [copy.deepcopy(model) for _ in range(ranks)]
    for rank, own in enumerate(slices):
        berts.slice_layers(own, rank, ranks)
    return model, inputs, slices


def whole(parts, sliced_in, name):
    return torch.cat(parts, sliced_in[name]) if name in sliced_in else parts[0]


@pytest.mark.parametrize(("kind", "precision"), [("mlm", "fp32"), ("classify", "bf16")])
def test_slices_together_are_the_whole_forward_and_backward(monkeypatch, kind, precision):
    model, inputs, slices = sliced(kind, 2)
    sums = Sums(2)
    monkeypatch.setattr(linear, "dist", sums)

    def run(rank):
        sums.on(rank)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            outputs = slices[rank](*inputs)
        outputs.float().square().sum().backward()
        return outputs.detach()

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = model(*inputs)
    expected.float().square().sum().backward()
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(run, range(2)))
    near = {"rtol": 1e-4, "atol": 1e-4} if precision == "fp32" else {"rtol": 0.05, "atol": 0.5}
    assert outputs[0].dtype == expected.dtype
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], expected.detach(), **near)
    assert sums.count == 2 * 4  # layers; attention and what is between, forward and backward
    dims = sliced_parameters(slices[0])
    for name, parameter in model.named_parameters():
        gradients = [one.get_parameter(name).grad for one in slices]
        torch.testing.assert_close(whole(gradients, dims, name), parameter.grad, **near)
        assert name in dims or torch.equal(*gradients)


def test_a_slice_holds_its_share_under_the_names_of_the_whole():
    model, _, slices = sliced("mlm", 2)
    dims = sliced_parameters(slices[0])
    assert list(slices[0].state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(whole([one.state_dict()[name] for one in slices], dims, name), value)
    per_layer = sum(value.numel() for name, value in model.named_parameters() if ".layer.0." in name)
    own = sum(value.numel() for name, value in slices[0].named_parameters() if ".layer.0." in name)
    assert own < 0.51 * per_layer
    assert sliced_parameters(copy.deepcopy(slices[0])) == dims
    assert sliced_parameters(model) == {}


def test_a_batch_without_samples_asks_nobody():
    _, inputs, slices = sliced("classify", 2)
    assert slices[0](*(one[:0] for one in inputs)).shape == (0, 3)


def test_ranks_draw_apart_and_then_alike_again():
    drawn = []
    for rank in (0, 1, 1):
        torch.manual_seed(5)
        with per_rank_draws(rank):
            apart = torch.rand(3)
        with per_rank_draws(rank):
            later = torch.rand(3)
        drawn.append((apart, later, torch.rand(3)))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert torch.equal(drawn[0][2], drawn[1][2])
    assert all(torch.equal(one, other) for one, other in zip(drawn[1], drawn[2], strict=True))


class Slice(Rank):
    """Rank `rank` of two, of one replica."""

    @property
    def data(self):
        return Rank()

    @property
    def replica(self):
        return Rank(self.rank, 2)


def test_random_numbers_are_those_of_the_replica():
    _, _, slices = sliced("mlm", 2)
    ranks = [Slice(rank, 2) for rank in (0, 1)]
    assert [Slices(rank, model).part.stream(rank) for rank, model in zip(ranks, slices, strict=True)] == [0, 0]
    assert [Layout().part.stream(Rank(rank, 2)) for rank in (0, 1)] == [0, 1]


def test_what_slices_sum_in_a_training_step_is_counted(monkeypatch):
    _, inputs, slices = sliced("mlm", 2)
    summed = []
    monkeypatch.setattr(linear, "dist", SimpleNamespace(all_reduce=lambda values: summed.append(values.nbytes)))
    where = Slices(Slice(0, 2), slices[0])
    step = SimpleNamespace(
        model=slices[0],
        phases=OFF,
        context=lambda _: nullcontext(),
        loss=lambda model, batch, **_: model(*batch["inputs"]),
    )
    passes = SimpleNamespace(add=lambda outputs: outputs.square().sum())
    slices[0](*inputs)  # as in an evaluation
    del summed[:]
    for _ in range(2):
        where.train(step, [{"inputs": inputs}] * 3, passes)
    assert len(summed) == 2 * 3 * 8
    assert where.part.sent_bytes() == ({}, sum(summed) // 2)


def test_what_is_whole_is_counted_once_in_the_norm():
    _, _, slices = sliced("mlm", 2)
    assert Slices(Slice(0, 2), slices[0]).part.counted_before == set()
    names = {id(parameter): name for name, parameter in slices[1].named_parameters()}
    before = {names[number] for number in Slices(Slice(1, 2), slices[1]).part.counted_before}
    assert before == set(names.values()) - sliced_parameters(slices[1]).keys()


@pytest.mark.parametrize(
    ("name", "differs"),
    [("bert.encoder.layer.1.output.LayerNorm.weight", True), ("bert.encoder.layer.1.output.dense.weight", False)],
)
def test_what_is_whole_must_have_the_same_bits_on_all_slices(name, differs):
    _, _, slices = sliced("mlm", 2)
    with torch.no_grad():
        slices[1].get_parameter(name).neg_()

    def answers(value):
        theirs = dict(
            zip((name for name, _ in slices[1].named_parameters()), parameter_sums(slices[1]).tolist(), strict=True)
        )
        if isinstance(value, dict):
            return [value, {name: theirs[name] for name in value}]
        return [value, value if not differs else "another"] if len(ranks.said) == 2 else [value, "of other slices"]

    ranks = Slice(0, 2, answers=answers)
    if not differs:
        check_replicas(ranks, Slices(ranks, slices[0]), slices[0], 3)
        return
    with pytest.raises(EndOfRun, match=rf"^replicas differ after step 3: rank 1 .* first in {name}\."):
        check_replicas(ranks, Slices(ranks, slices[0]), slices[0], 3)


@pytest.mark.parametrize(("saved", "now"), [(2, 2), (2, 1), (1, 2)])
def test_what_slices_have_saved_is_brought_back_by_as_many_or_others(saved, now):
    """Momentum, too; 1 is a whole model."""
    model, _, slices = sliced("mlm", 2)

    def parts(one, rank, count):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        comm = Slice(rank, 2) if count == 2 else Rank()
        where = Slices(comm, one) if count == 2 else Layout()
        of_both = {"average": None, "device": torch.device("cpu"), "seed": 0, "shared": {}, "per_rank": {}}
        return state.State(model=one, optimizer=optimizer, comm=comm, where=where, **of_both)

    def stepped(one):
        for name, parameter in one.model.named_parameters():
            parameter.grad = parameter.detach() * len(name)
        one.optimizer.step()
        return one

    all_of = {1: [model], 2: slices}
    before = [stepped(parts(one, rank, saved)) for rank, one in enumerate(all_of[saved])]
    expected = [stepped(parts(copy.deepcopy(one), rank, now)) for rank, one in enumerate(sliced("mlm", 2)[2])]
    if now == 1:
        expected = [stepped(parts(sliced("mlm", 2)[0], 0, 1))]
    owns = [{"part": state._part_state(one, one.of_models())} for one in before]
    for rank, one in enumerate(expected):
        fits = saved == now
        found = state.join_parts([owns[rank]] if fits else owns, one, fits=fits)
        wanted = state._part_state(one, one.of_models())
        assert found["model"].keys() == wanted["model"].keys()
        assert found["average"] is None
        for name, value in wanted["model"].items():
            assert torch.equal(found["model"][name], value)
            assert found["held"][name].keys() == wanted["held"][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
            for key, held in wanted["held"][name].items():
                assert torch.equal(found["held"][name][key], held)


def test_sizes_that_cannot_be_sliced():
    require_facts(refused(lambda: texts.parse(["--tensor", "0"])), "--tensor 0: must be at least 1")
    base = berts.sizes_of("bert_base", vocabulary=50)
    require_facts(refused(lambda: berts.require_slices(base, 5)), "--tensor 5: ... 12 heads ... --tensor 4")
    sizes = berts.BertSizes(vocabulary=50, width=12, layers=1, heads=6, intermediate=10)
    message = refused(lambda: berts.require_slices(sizes, 3))
    require_facts(message, "--tensor 3: ... 10 intermediate units ... --tensor 2")
    berts.require_slices(sizes, 2)
