"""The clock of CUDA events; skipped where there is no GPU."""

import time

import pytest
import torch

from hvdtrain.insight.profiling.clocks import WARMUP_STEPS, DeviceClock
from hvdtrain.insight.profiling.passes import BLOCK_STEPS, make_clock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LONG = 20_000_000  # cycles: some 10 ms


@pytest.fixture(autouse=True)
def settled_clock():
    """An idle GPU's clock climbs for a while, on an H200 from 345 to 1,980 MHz: cycles are shorter later."""
    torch.cuda._sleep(100 * LONG)
    torch.cuda.synchronize()


def steps(one, count):
    for _ in range(count):
        one.enter("read")
        time.sleep(0.005)  # the device has nothing to do
        one.enter("forward")
        torch.cuda._sleep(LONG)  # the host goes on at once
        one.enter("backward")
        torch.cuda._sleep(2 * LONG)
        one.enter("sync")
        torch.cuda.synchronize()
        one.enter("optimizer")
        one.end_step()


def test_work_is_counted_in_the_phase_that_it_was_given_in():
    one = make_clock("on", torch.device("cuda", 0), list)
    assert isinstance(one, DeviceClock)
    steps(one, 10)
    means = one.means()
    require_places(means.phases_s)
    assert sum(means.phases_s.values()) == pytest.approx(means.step_s, rel=0.05)


def test_both_passes_count_it_there():
    one = make_clock("exact", torch.device("cuda", 0), list)
    steps(one, WARMUP_STEPS + 2 * BLOCK_STEPS)
    means = one.means()
    require_places(means.phases_s)
    require_places(means.alone_s)


def require_places(phases_s):
    assert phases_s["read"] > 0.004
    assert phases_s["backward"] == pytest.approx(2 * phases_s["forward"], rel=0.2)
    assert phases_s["sync"] < 0.1 * phases_s["forward"]
