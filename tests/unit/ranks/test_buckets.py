import copy
from functools import partial
from operator import methodcaller
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.distributed_optimizer import WireCompressor
from hvdtrain.ranks.wire import Wire
from hvdtrain.settings.safety.calls import NOWHERE
from tests.ranks import together

MIB = 2**20


class Sync(BucketSync):
    """Among ranks that are threads; it notes what is sent, and that it does not change on its way."""

    def __init__(self, comm, model, *, compression="none", bucket_mb=25.0):
        self.sent, self.ranks = [], comm
        wire = Wire(comm.size, is_half=compression == "fp16")
        super().__init__(
            model,
            SimpleNamespace(allgather=comm.allgather, begin_sum=self.begin, calls=NOWHERE),
            wire,
            bucket_mb=bucket_mb,
        )

    def begin(self, values, name):
        self.sent.append((name, values.numel(), values.dtype))
        before = values.clone()

        def wait():
            assert torch.equal(values, before)
            return values.copy_(self.ranks.allreduce(values, name))

        return wait


class Net(nn.Module):
    """Used in the order a, b, c, unless it is told which; `both` stands for two weights that are one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.randn(3, 3, generator=generator).to(dtype)))
        self.frozen = nn.Parameter(torch.ones(3, 3).to(dtype), requires_grad=False)

    def forward(self, inputs, used="abc"):
        for name in used:
            inputs = torch.tanh(inputs @ getattr(self, name)) @ self.frozen
        return inputs.sum()


def inputs_of(rank, number=0):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank))


def step(sync, losses):
    """One step with so many backward passes; the gradients by name."""
    for part in sync._parts:
        part.parameter.grad = None
    sync.expect(len(losses))
    for loss in losses:
        loss().backward()
    sync.finish()
    return {part.name: part.parameter.grad.clone() for part in sync._parts}


def alone(model, passes_of_ranks):
    """The sums of the gradients that each rank has by itself, by name; None for those that no rank has."""
    totals = dict.fromkeys((name for name, one in model.named_parameters() if one.requires_grad), 0.0)
    for passes in passes_of_ranks:
        twin = copy.deepcopy(model)
        for loss in passes:
            loss(twin).backward()
        for name in totals:
            if twin.get_parameter(name).grad is not None:
                totals[name] = totals[name] + twin.get_parameter(name).grad
    return totals


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, sums in expected.items():
        assert torch.equal(found[name], torch.as_tensor(sums).expand_as(found[name])), name


@pytest.mark.parametrize(("bucket_mb", "passes"), [(0.0, 1), (72 / MIB, 3), (25.0, 1)])
def test_gradients_are_the_sums_over_ranks_in_every_step(bucket_mb, passes):
    def program(comm):
        model = Net()
        sync = Sync(comm, model, bucket_mb=bucket_mb)
        found = []
        for number in range(3):
            inputs = [inputs_of(comm.rank, 10 * number + one) for one in range(passes)]
            found.append(step(sync, [partial(model, one) for one in inputs]))
        return found

    for found in together(2, program):
        for number in range(3):
            ranks = [
                [methodcaller("forward", inputs_of(rank, 10 * number + one)) for one in range(passes)]
                for rank in range(2)
            ]
            assert_equal(found[number], alone(Net(), ranks))


def test_the_first_step_finds_the_order_and_from_then_on_backward_sends():
    """c comes first, and two of 36 bytes fit into a bucket; the first sum begins before the last gradient is there."""

    def program(comm):
        model = Net()
        sync = Sync(comm, model, bucket_mb=72 / MIB)
        within = []
        for _ in range(2):
            sync.expect(1)
            model(inputs_of(comm.rank)).backward()
            within.append(list(sync.sent))
            sync.finish()
            model.zero_grad()
        return within, sync.sent, [part.name for bucket in sync._buckets for part in bucket.parts]

    two, one = ("gradients.0", 18, torch.float32), ("gradients.1", 9, torch.float32)
    for within, sent, order in together(2, program):
        assert within == [[], [two, one, two, one]]
        assert sent == [two, one, two, one]
        assert order == ["c", "b", "a"]


def test_a_bucket_waits_for_the_last_pass():
    def program(comm):
        model = Net()
        sync = Sync(comm, model, bucket_mb=0.0)
        step(sync, [lambda: model(inputs_of(0))])
        sync.sent.clear()
        model.zero_grad()
        sync.expect(2)
        model(inputs_of(0)).backward()
        after_first = list(sync.sent)
        places = [part.parameter.grad is part.view for part in sync._parts]
        model(inputs_of(1)).backward()
        after_second = len(sync.sent)
        sync.finish()
        return after_first, places, after_second, len(sync.sent)

    assert together(2, program) == [([], [True] * 3, 3, 3)] * 2


# Which parameters a rank uses, in pass 1 and pass 2 of a step
USES = {
    "nobody uses b": [("ac", "ac"), ("ac", "ac")],
    "rank 0 does not use b": [("ac", "ac"), ("abc", "abc")],
    "b in another pass of each rank": [("ac", "abc"), ("abc", "ac")],
    "rank 0 uses nothing": [("", ""), ("abc", "abc")],
    "ranks use them in other orders": [("abc", "abc"), ("bca", "cab")],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_parameter_may_be_used_on_some_ranks_and_in_some_passes(uses, is_first):
    """In the first step, or after one in which all ranks have used everything."""

    def loss(model, rank, one):
        used = uses[rank][one]
        own = inputs_of(rank, one)
        return model(own, used) if used else (model(own[:0]) if one else model(own, "abc") * 0.0)

    def program(comm):
        model = Net()
        sync = Sync(comm, model, bucket_mb=25.0 if is_first else 0.0)
        if not is_first:
            step(sync, [lambda: model(inputs_of(comm.rank))])
        found = step(sync, [lambda one=one: loss(model, comm.rank, one) for one in range(2)])
        frozen = model.frozen.grad
        return found, frozen

    ranks = [[lambda twin, rank=rank, one=one: loss(twin, rank, one) for one in range(2)] for rank in range(2)]
    for found, frozen in together(2, program):
        assert_equal(found, alone(Net(), ranks))
        assert frozen is None


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [("none", torch.float64), ("none", torch.bfloat16), ("fp16", torch.float32), ("fp16", torch.bfloat16)],
)
def test_gradients_travel_as_they_do_one_by_one(compression, dtype):
    gradients = [torch.randn(2, 5, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    compressor = WireCompressor(Wire(2, is_half=compression == "fp16"))
    one_by_one = [compressor.compress(gradient) for gradient in gradients]
    expected = compressor.decompress(sum(tensor for tensor, _ in one_by_one), one_by_one[0][1])

    def program(comm):
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(2, 5, dtype=dtype))
        sync = Sync(comm, model, compression=compression)
        return [step(sync, [lambda: torch.sum(model.weight * gradients[comm.rank])]) for _ in range(2)], sync.sent

    sent = torch.float16 if compression == "fp16" else torch.float32 if dtype == torch.bfloat16 else dtype
    for steps, travelled in together(2, program):
        assert {kind for _, _, kind in travelled} == {sent}
        for found in steps:
            assert found["weight"].dtype == dtype
            assert torch.equal(found["weight"], expected)


def test_a_shared_parameter_is_sent_once():
    def program(comm):
        model = Net()
        model.b = model.a
        sync = Sync(comm, model, bucket_mb=0.0)
        step(sync, [lambda: model(inputs_of(comm.rank))])
        found = step(sync, [lambda: model(inputs_of(comm.rank))])
        return found, len(sync.sent)

    expected = Net()
    expected.b = expected.a
    ranks = [[lambda twin, rank=rank: twin(inputs_of(rank))] for rank in range(2)]
    for found, sent in together(2, program):
        assert_equal(found, alone(expected, ranks))
        assert sent == 2 * 2


def test_a_deep_copy_of_the_model_sends_nothing():
    def program(comm):
        model = Net()
        sync = Sync(comm, model)
        expected = step(sync, [lambda: model(inputs_of(comm.rank))])
        sync.sent.clear()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(inputs_of(5)).backward()
        assert sync.sent == []
        assert_equal({part.name: part.parameter.grad for part in sync._parts}, expected)
        return True

    assert together(2, program) == [True] * 2


@pytest.mark.slow
def test_a_compiled_model_is_summed_too():
    def program(comm, *, is_compiled):
        model = Net()
        if is_compiled:
            model.compile(backend="aot_eager")
        sync = Sync(comm, model)
        return [step(sync, [lambda: model(inputs_of(comm.rank))]) for _ in range(2)], len(sync.sent)

    (eager, sent), (found, also_sent) = (
        together(1, partial(program, is_compiled=is_compiled))[0] for is_compiled in (False, True)
    )
    torch.testing.assert_close(found, eager)
    assert sent == also_sent == 2
