"""The time of a step on a GPU: the roofline of its operators, and a realistic expectation.

Each operator takes as long as the slower of its arithmetic and its memory traffic; all together take at least as long
as the host needs to launch their kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from hvdtrain.costs.counts import Operation
from hvdtrain.costs.devices import Device

Bound = Literal["launch", "memory", "arithmetic"]

# Shares of the peaks that large, well-tuned kernels reach: cuBLAS for matrices in fp32 and in tensor cores, and copies
# in memory. On a V100 SGEMM reaches 14 of 15.7 TFLOP/s; on an A100 matrices in bf16 reach 250 of 312.
FP32_SHARE, TENSOR_SHARE, BANDWIDTH_SHARE = 0.9, 0.75, 0.75
# From the end of one kernel to the start of the next, for kernels of any size.
KERNEL_S = 2e-6
# Time of the host to launch a kernel, including autograd, Python's modules and hooks: a forward pass of NVIDIA's
# efficientnet-b0 with one image takes 9.3 ms on an A100 (DeepLearningExamples, PyTorch efficientnet README, TF32
# latency) and b4's 16.2 ms, for 300 and 600 operators; a backward pass, which runs in C++, takes about a third of that.
LAUNCH_S = 12e-6

# Multiples of LAUNCH_S for a faster and a slower host.
FAST_HOST, SLOW_HOST = 0.5, 2.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the roofline's speed that measured steps reach."""

    expected: float  # the median
    low: float  # the lowest
    high: float  # the highest


# From 14 rows of V100 and 6 of A100 in docs/reference/step-costs.md (`python bench/step_costs.py published`). On one
# H100 efficientnet_b0 reached 0.60 and bert_large 0.71 (bench/results/gpu-dry-run.json); the band is wider than these.
_HOPPER = Shares(expected=0.65, low=0.55, high=0.75)
SHARES = {
    "v100": Shares(expected=0.69, low=0.61, high=0.90),
    "a100": Shares(expected=0.51, low=0.43, high=0.56),
    "h100": _HOPPER,
    "h200": _HOPPER,
}


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step if each operator performed like a well-tuned one."""

    shares: Shares  # of the GPU
    launch_s: float  # of the host
    memory_s: float  # of memory-bound operators
    arithmetic_s: float  # of compute-bound operators

    @property
    def device_s(self) -> float:
        return self.memory_s + self.arithmetic_s

    @property
    def step_s(self) -> float:
        return max(self.launch_s, self.device_s)

    @property
    def expected_s(self) -> float:
        """The seconds expected from the median of published steps."""
        return max(self.launch_s, self.device_s / self.shares.expected)

    @property
    def low_s(self) -> float:
        """The fastest of measured steps (see `high_s`); for a launch-bound step, the time with a fast host."""
        return max(FAST_HOST * self.launch_s, self.device_s / self.shares.high)

    @property
    def high_s(self) -> float:
        return max(SLOW_HOST * self.launch_s, self.device_s / self.shares.low)

    @property
    def bound(self) -> Bound:
        """The bottleneck of the step."""
        if self.launch_s > self.device_s / self.shares.expected:
            return "launch"
        return "memory" if self.memory_s >= self.arithmetic_s else "arithmetic"


def roofline(operations: Iterable[Operation], device: Device, precision: str) -> Roofline:
    """Return the roofline of operators; `precision` is fp32, tf32 or a half, and applies to float32 matrices."""
    launch_s = memory_s = arithmetic_s = 0.0
    single = matrix_rate(device, precision if precision in ("fp32", "tf32") else "tf32")
    half = matrix_rate(device, "fp16")
    for one in operations:
        is_half = one.dtype in (torch.float16, torch.bfloat16)
        computing_s = one.flops / (half if is_half else single)
        moving_s = max(one.bytes / (BANDWIDTH_SHARE * device.bandwidth), KERNEL_S * one.kernels)
        launch_s += LAUNCH_S * one.kernels
        if computing_s > moving_s:
            arithmetic_s += computing_s
        else:
            memory_s += moving_s
    return Roofline(shares=SHARES[device.name], launch_s=launch_s, memory_s=memory_s, arithmetic_s=arithmetic_s)


def matrix_rate(device: Device, precision: str) -> float:
    """Return the FLOP/s that matrices of this precision reach; without TF32 they are computed in fp32."""
    peak = device.peak(precision)
    return peak * (FP32_SHARE if peak == device.fp32 else TENSOR_SHARE)
