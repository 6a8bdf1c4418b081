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


def host_item(x):
    return x.sum().item()


def host_bool(x):
    return bool(x.sum() > 0)


def nonzero(x):
    return x.nonzero()


def index_by_mask(x):
    return x[x > 0]


def index_by_host_indices(x):
    return x[torch.tensor([1, 2])]


def masked_select(x):
    return x.masked_select(x > 0)


def unique(x):
    return x.unique()


def tensor_of_a_list(x):
    return torch.tensor([1.0, 2.0], device=x.device)


def new_tensor(x):
    return x.new_tensor(3.0)


def to_the_host(x):
    return x.cpu()


def to_a_list(x):
    return x.tolist()


def pageable_non_blocking(x):
    return torch.rand(8).to(x.device, non_blocking=True)


def pageable_into(x):
    return torch.empty(8).copy_(x, non_blocking=True)


def pinned_but_blocking(x):
    return torch.rand(8).pin_memory().to(x.device)


def synchronize_all(x):
    torch.cuda.synchronize()


def synchronize_a_stream(x):
    torch.cuda.current_stream().synchronize()


def synchronize_an_event(x):
    event = torch.cuda.Event()
    x.mul_(2)
    event.record()
    event.synchronize()


WAITS = [
    *(host_item, host_bool, nonzero, index_by_mask, index_by_host_indices, masked_select, unique, tensor_of_a_list),
    *(new_tensor, to_the_host, to_a_list, pageable_non_blocking, pageable_into, pinned_but_blocking, synchronize_all),
    *(synchronize_a_stream, synchronize_an_event),
]


def is_in(stack, function):
    """Whether the innermost line of the project is one of this function."""
    return stack.innermost.split()[-1] == getattr(function, "__qualname__", function)


@pytest.mark.parametrize("plant", WAITS)
def test_a_wait_is_found(gpu, plant):
    x = torch.rand(8, device=CUDA)
    assert gpu.waits == []
    plant(x)
    [wait] = gpu.waits
    assert is_in(wait.stack, plant)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(HostWaitError):
        plant(x)


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


def test_steps_as_they_are_are_fine(gpu):
    step_of().take().read()
    for sums in (BUCKET, HOROVOD):
        with two_ranks(gpu):
            step_of(sums).take().read()
    assert [str(finding) for finding in gpu.findings] == []


def test_a_wait_inside_a_step_is_found_with_its_stack(gpu, monkeypatch):
    made = step_of()
    original = type(made.step.task).loss

    def waiting_loss(self, *args, **options):
        sums = original(self, *args, **options)
        sums.loss.item()
        return sums

    monkeypatch.setattr(type(made.step.task), "loss", waiting_loss)
    before = len(gpu.waits)
    made.take()
    [wait] = gpu.waits[before:]
    assert wait.stack.innermost.endswith("waiting_loss")
    assert wait.stack.passes("Step.__call__")


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


def test_a_tensor_of_the_host_in_a_step_is_found(gpu, monkeypatch):
    made = step_of()

    def mixed_norm():
        return torch.ones(1, device=CUDA) + torch.ones(1)

    monkeypatch.setattr(made.step, "_norm", mixed_norm)
    with pytest.raises(RuntimeError, match="same device"):
        made.take(measure=True)
    [finding] = gpu.findings
    assert finding.kind == MIXED
    assert finding.stack.innermost.endswith("mixed_norm")


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


def test_a_gradient_that_is_changed_while_it_is_summed_is_a_race(gpu, monkeypatch):
    with two_ranks(gpu) as horovod:
        made = step_of(BUCKET)
        send = BucketSync._send

        def send_and_change(self, bucket):
            send(self, bucket)
            horovod.cycle()
            bucket.wire_values.mul_(2)

        monkeypatch.setattr(BucketSync, "_send", send_and_change)
        made.take()
    assert kinds(gpu) == {RACE}
    assert gpu.findings[0].stack.innermost.endswith("send_and_change")


def feed():
    stream, total = torch.cuda.Stream(CUDA), torch.zeros(1000, device=CUDA)
    batches = [{"images": torch.full((1000,), float(number)).pin_memory()} for number in range(6)]
    for batch in prefetched(batches, CUDA, stream):
        total += batch["images"]
        del batch
    return total


def test_a_feed_as_it_is_is_fine(gpu):
    assert feed()[0].item() == 15
    assert kinds(gpu) == set()


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


def test_memory_of_a_stream_that_another_still_uses_is_found(gpu):
    side = torch.cuda.Stream(CUDA)
    x = torch.rand(8, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    del x
    assert kinds(gpu) == {GIVEN_BACK}


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
    assert is_in(finding.stack, Pending.read)


def test_a_checkpoint_that_does_not_wait_for_its_copies_is_found(gpu, monkeypatch):
    x = torch.rand(8, device=CUDA)
    assert copy_to_host([x])[0].sum() > 0
    assert kinds(gpu) == set()
    monkeypatch.setattr(Stream, "synchronize", lambda *_: None)
    assert copy_to_host([x])[0].sum() > 0
    assert kinds(gpu) == {PINNED}
