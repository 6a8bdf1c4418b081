"""Times from operations, and memory from batches."""

from dataclasses import replace

import pytest
import torch

from hvdtrain.insight.costs.counts import Operation
from hvdtrain.insight.costs.devices import A100, V100
from hvdtrain.insight.costs.report import cost_on, largest_batch, usable_bytes
from hvdtrain.insight.costs.roofline import BANDWIDTH_SHARE, FP32_SHARE, LAUNCH_S, TENSOR_SHARE, roofline

MATRIX = Operation(name="aten::mm", kernels=1, flops=10**12, bytes=10**6, dtype=torch.float32)
COPY = Operation(name="aten::add", kernels=1, flops=0, bytes=10**10, dtype=torch.float32)
SMALL = Operation(name="aten::add", kernels=3, flops=0, bytes=8, dtype=torch.float32)


def cost(*operations):
    time = roofline(operations, A100, "tf32")
    return cost_on(A100, time, samples=8, batch=8, total_bytes=0, per_sample=1.0, at_most=8)


def test_each_operator_takes_as_long_as_the_slower_of_both():
    time = roofline([MATRIX, COPY], A100, "tf32")
    assert time.arithmetic_s == pytest.approx(1e12 / (TENSOR_SHARE * A100.tf32))
    assert time.memory_s == pytest.approx(1e10 / (BANDWIDTH_SHARE * A100.bandwidth))
    found = cost(MATRIX, COPY)
    assert found.roofline_s == time.memory_s + time.arithmetic_s
    assert found.roofline_s < found.low_s < found.step_s < found.high_s


def test_matrices_take_their_own_precision():
    half = replace(MATRIX, dtype=torch.bfloat16)
    times = [roofline([one], A100, precision).arithmetic_s for one, precision in ((MATRIX, "fp32"), (half, "bf16"))]
    assert times[0] / times[1] == pytest.approx(TENSOR_SHARE * A100.half / (FP32_SHARE * A100.fp32))
    assert roofline([MATRIX], V100, "tf32") == roofline([MATRIX], V100, "fp32")  # it has no TF32


@pytest.mark.parametrize(("operation", "bound"), [(COPY, "memory"), (MATRIX, "arithmetic"), (SMALL, "launch")])
def test_the_bound_is_named(operation, bound):
    assert cost(operation).bound == bound


def test_small_kernels_are_bound_by_their_start():
    found = cost(SMALL)
    assert found.roofline_s == found.step_s == 3 * LAUNCH_S
    assert (found.low_s, found.high_s) == (found.step_s / 2, found.step_s * 2)


def test_the_largest_batch_fills_the_memory():
    batch = largest_batch(A100, 16, 5 * 2**30, per_sample=2.0**28, at_most=1000)
    assert (batch - 16) * 2**28 + 5 * 2**30 <= usable_bytes(A100) < (batch - 15) * 2**28 + 5 * 2**30
    assert largest_batch(A100, 2, 2**39, per_sample=2.0**38, at_most=1000) == 0
    assert largest_batch(A100, 2, 512, per_sample=0.0, at_most=1000) == 1000
