"""The simulated GPU can find what it is there for: faults are planted, and each is found where it is."""

import pytest
import torch
from torch import nn

from hvdtrain.core.host_copies import copy_to_host
from hvdtrain.core.pending import Pending
from hvdtrain.feed.feed import prefetched
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.comm import HorovodComm, SerialComm
from hvdtrain.ranks.wire import Wire
from tests.simgpu.cases import BUCKET, FACTORS, FUNCTION, HOROVOD, ONE_RANK
from tests.simgpu.programs import Prepared
from tests.simgpu.simulator.findings import GIVEN_BACK, MIXED, PINNED, RACE, HostWaitError
from tests.simgpu.simulator.horovod import two_ranks
from tests.simgpu.simulator.streams import Event, Stream
from tests.simgpu.simulator.tensor import CUDA, SimTensor


def synchronize_an_event(x):
    event = torch.cuda.Event()
    x.mul_(2)
    event.record()
    event.synchronize()


WAITS = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "index by a mask": lambda x: x[x > 0],
    "index by indices of the host": lambda x: x[torch.tensor([1, 2])],
    "tensor of a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "to a list": lambda x: x.tolist(),
    "pageable": lambda x: torch.rand(8).to(x.device, non_blocking=True),
    "pageable into": lambda x: torch.empty(8).copy_(x, non_blocking=True),
    "pinned but blocking": lambda x: torch.rand(8).pin_memory().to(x.device),
    "synchronize": lambda _: torch.cuda.current_stream().synchronize(),
    "synchronize an event": synchronize_an_event,
}


def is_in(stack, function):
    """Whether the innermost line of the project is one of this function."""
    return stack.innermost.split()[-1] == getattr(function, "__qualname__", function)


def test_a_wait_is_found(gpu):
    x = torch.rand(8, device=CUDA)
    assert gpu.waits == []
    for number, plant in enumerate(WAITS.values()):
        plant(x)
        assert len(gpu.waits) == number + 1
        assert is_in(gpu.waits[-1].stack, plant)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(HostWaitError):
        x.tolist()


def test_what_does_not_wait_is_none(gpu):
    x = torch.rand(8, device=CUDA)
    y = torch.rand(8).pin_memory().to(CUDA, non_blocking=True)
    x.add_(y).mul_(torch.tensor(2.0))  # a number of the host is an argument of the kernel
    x[torch.arange(3, device=CUDA)] = x.new_full((), 1.0)
    torch.where(x > 0, x, 0.0).sum()
    assert (gpu.waits, gpu.findings) == ([], [])


def kinds(gpu):
    return {finding.kind for finding in gpu.findings}


def step_of(sums=ONE_RANK):
    words = f"{FACTORS['program'][FUNCTION]} {FACTORS['sums'][sums]}".split()
    made = Prepared(FUNCTION, words, SerialComm() if sums == ONE_RANK else HorovodComm(None), CUDA)
    made.take().read()
    return made


def test_a_wait_in_a_hook_of_backward_is_found_with_both_stacks(gpu):
    made = step_of()
    before = len(gpu.waits)

    def waiting_hook(gradient):
        gradient.sum().item()

    next(made.step.model.parameters()).register_hook(waiting_hook)
    made.take()
    [wait] = gpu.waits[before:]
    assert wait.stack.innermost.endswith("waiting_hook")
    assert wait.stack.passes("Step.__call__")  # in another thread


def test_a_model_on_the_host_is_found(gpu):
    with pytest.raises(RuntimeError, match="same device"):
        nn.Linear(2, 2)(torch.rand(2, 2, device=CUDA))
    assert kinds(gpu) == {MIXED}


def test_sums_that_do_not_wait_for_gradients_are_a_race(gpu, monkeypatch):
    """Horovod without its ReadyEvent."""
    for sums in (BUCKET, HOROVOD):
        with two_ranks(gpu), monkeypatch.context() as patch:
            made = step_of(sums)
            gpu.findings.clear()
            patch.setattr(Event, "wait", lambda *_: None)
            made.take()
            assert kinds(gpu) == {RACE}


def test_gradients_that_are_used_before_their_sum_are_a_race(gpu, monkeypatch):
    with two_ranks(gpu) as horovod:
        made, original = step_of(BUCKET), BucketSync._send

        def send(self, bucket):
            original(self, bucket)
            horovod.cycle()
            bucket.wait = lambda: None

        monkeypatch.setattr(BucketSync, "_send", send)
        made.take()
    assert kinds(gpu) == {RACE}
    assert is_in(gpu.findings[0].stack, Wire.unpack)


def feed():
    stream, total = torch.cuda.Stream(CUDA), torch.zeros(1000, device=CUDA)
    batches = [{"images": torch.full((1000,), float(number)).pin_memory()} for number in range(6)]
    for batch in prefetched(batches, CUDA, stream):
        total += batch["images"]
        del batch
    return total


def test_a_batch_that_is_used_before_it_has_come_is_a_race(gpu, monkeypatch):
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    monkeypatch.setattr(SimTensor, "record_stream", lambda *_: None)
    feed()
    assert RACE in kinds(gpu)
    assert all(is_in(finding.stack, feed) for finding in gpu.findings if finding.kind == RACE)


def test_a_batch_that_is_given_back_while_it_is_used_is_found(gpu, monkeypatch):
    monkeypatch.setattr(SimTensor, "record_stream", lambda *_: None)
    feed()
    assert kinds(gpu) == {GIVEN_BACK}
    assert all(is_in(finding.stack, feed) for finding in gpu.findings)


def test_pinned_memory_that_is_overwritten_while_it_is_copied_is_found(gpu):
    batch = torch.rand(8).pin_memory()
    batch.to(CUDA, non_blocking=True)
    batch.zero_()
    assert kinds(gpu) == {PINNED}


def test_pinned_memory_that_is_read_before_the_copy_has_come_is_found(gpu):
    made = step_of()
    pending = made.take()
    pending._copied = None
    pending.read()
    [finding] = gpu.findings
    assert finding.kind == PINNED
    assert is_in(finding.stack, Pending._wait)


def test_a_checkpoint_that_does_not_wait_for_its_copies_is_found(gpu, monkeypatch):
    x = torch.rand(8, device=CUDA)
    assert copy_to_host([x])[0].sum() > 0
    assert kinds(gpu) == set()
    monkeypatch.setattr(Stream, "synchronize", lambda *_: None)
    assert copy_to_host([x])[0].sum() > 0
    assert kinds(gpu) == {PINNED}
