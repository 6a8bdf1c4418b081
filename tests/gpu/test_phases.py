"""The clock of CUDA events; skipped where there is no GPU."""

import time

import pytest
import torch

from hvdtrain.timing.passes import TwoPasses, clock
from hvdtrain.timing.phases import DeviceClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LONG = 20_000_000  # cycles: some 10 ms


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
        one.step_done()


@pytest.mark.parametrize(("mode", "kind"), [("on", DeviceClock), ("exact", HostClock)])
def test_work_is_counted_in_the_phase_that_it_was_given_in(mode, kind):
    one = clock(mode, torch.device("cuda", 0))
    assert isinstance(one, kind)
    steps(one, 10)
    means = one.means()
    assert means.phases_s["read"] > 0.004
    assert means.phases_s["backward"] == pytest.approx(2 * means.phases_s["forward"], rel=0.1)
    assert means.phases_s["sync"] < 0.1 * means.phases_s["forward"]
    assert sum(means.phases_s.values()) == pytest.approx(means.step_s, rel=0.05)
