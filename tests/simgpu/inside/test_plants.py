"""The simulated GPU can find what it is there for: faults are planted, and each is found where it is."""

import torch

from hvdtrain.core.pending import Pending
from hvdtrain.ranks.comm import HorovodComm, SerialComm
from tests.simgpu.cases import BUCKET, FACTORS, FUNCTION, HOROVOD, ONE_RANK
from tests.simgpu.programs import Prepared
from tests.simgpu.simulator.findings import PINNED, RACE
from tests.simgpu.simulator.horovod import two_ranks
from tests.simgpu.simulator.streams import Event
from tests.simgpu.simulator.tensor import CUDA


def synchronize_an_event(x):
    event = torch.cuda.Event()
    x.mul_(2)
    event.record()
    event.synchronize()


WAITS = {
    "item": lambda x: x.sum().item(),
    "index by a mask": lambda x: x[x > 0],
    "index by indices of the host": lambda x: x[torch.tensor([1, 2])],
    "tensor of a list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "pageable": lambda x: torch.rand(8).to(x.device, non_blocking=True),
    "pinned but blocking": lambda x: torch.rand(8).pin_memory().to(x.device),
    "synchronize": lambda _: torch.cuda.current_stream().synchronize(),
    "synchronize an event": synchronize_an_event,
}


def is_in(finding, function):
    """Whether the innermost line of the project is one of this function."""
    return finding.lines[-1].endswith(f" {function.__qualname__}")


def test_a_wait_is_found(gpu):
    x = torch.rand(8, device=CUDA)
    assert gpu.waits == []
    for number, plant in enumerate(WAITS.values()):
        plant(x)
        assert len(gpu.waits) == number + 1
        assert is_in(gpu.waits[-1], plant)


def kinds(gpu):
    return {finding.kind for finding in gpu.findings}


def step_of(sums=ONE_RANK):
    words = f"{FACTORS['program'][FUNCTION]} {FACTORS['sums'][sums]}".split()
    made = Prepared(FUNCTION, words, SerialComm() if sums == ONE_RANK else HorovodComm(None), CUDA)
    made.run_step().read()
    return made


def test_sums_that_do_not_wait_for_gradients_are_a_race(gpu, monkeypatch):
    """Horovod without its ReadyEvent."""
    for sums in (BUCKET, HOROVOD):
        with two_ranks(gpu), monkeypatch.context() as patch:
            made = step_of(sums)
            gpu.findings.clear()
            patch.setattr(Event, "wait", lambda *_: None)
            made.run_step()
            assert kinds(gpu) == {RACE}


def test_pinned_memory_that_is_overwritten_while_it_is_copied_is_found(gpu):
    batch = torch.rand(8).pin_memory()
    batch.to(CUDA, non_blocking=True)
    batch.zero_()
    assert kinds(gpu) == {PINNED}


def test_pinned_memory_that_is_read_before_the_copy_has_come_is_found(gpu):
    made = step_of()
    pending = made.run_step()
    pending._copied = None
    pending.read()
    [finding] = gpu.findings
    assert finding.kind == PINNED
    assert is_in(finding, Pending.read)
