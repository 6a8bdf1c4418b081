"""The time of a step on a GPU: the roofline of its operators.

Each operator takes as long as the slower of its arithmetic and its memory traffic; all together take at least as long
as the host needs to launch their kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hvdtrain.insight.costs.counts import Operation
from hvdtrain.insight.costs.devices import Device

# Shares of the peaks that large, well-tuned kernels reach: cuBLAS for matrices in fp32 and in tensor cores, and copies
# in memory. On a V100 SGEMM reaches 14 of 15.7 TFLOP/s; on an A100 matrices in bf16 reach 250 of 312.
FP32_SHARE, TENSOR_SHARE, BANDWIDTH_SHARE = 0.9, 0.75, 0.75
# From the end of one kernel to the start of the next, for kernels of any size.
KERNEL_S = 2e-6
# Time of the host to launch a kernel, including autograd, Python's modules and hooks: a forward pass of NVIDIA's
# efficientnet-b0 with one image takes 9.3 ms on an A100 (DeepLearningExamples, PyTorch efficientnet README, TF32
# latency) and b4's 16.2 ms, for 300 and 600 operators; a backward pass, which runs in C++, takes about a third of that.
LAUNCH_S = 12e-6


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of a step if each operator performed like a well-tuned one."""

    launch_s: float  # of the host
    memory_s: float  # of memory-bound operators
    arithmetic_s: float  # of compute-bound operators

    def step_s(self, share: float = 1.0, *, host: float = 1.0) -> float:
        """Return the seconds if the GPU reaches a share of this speed, and the host takes `host` times as long."""
        return max(host * self.launch_s, (self.memory_s + self.arithmetic_s) / share)


def roofline(operations: Iterable[Operation], device: Device, precision: str) -> Roofline:
    """Return the roofline of operators; `precision` is fp32, tf32 or a half, and applies to float32 matrices."""
    launch_s = memory_s = arithmetic_s = 0.0
    has_tf32 = precision != "fp32" and device.tf32 > device.fp32
    single = TENSOR_SHARE * device.tf32 if has_tf32 else FP32_SHARE * device.fp32
    for one in operations:
        is_half = one.dtype in (torch.float16, torch.bfloat16)
        computing_s = one.flops / (TENSOR_SHARE * device.half if is_half else single)
        moving_s = max(one.bytes / (BANDWIDTH_SHARE * device.bandwidth), KERNEL_S * one.kernels)
        launch_s += LAUNCH_S * one.kernels
        if computing_s > moving_s:
            arithmetic_s += computing_s
        else:
            memory_s += moving_s
    return Roofline(launch_s=launch_s, memory_s=memory_s, arithmetic_s=arithmetic_s)
