"""GPUs by name, with their makers' peak figures."""

from dataclasses import dataclass, replace

_MIB, _GB, _TFLOPS = 2**20, 10**9, 10**12


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the roofline's speed that measured steps reach."""

    expected: float  # the median
    low: float  # the lowest
    high: float  # the highest


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU's peaks."""

    name: str
    memory_bytes: int  # as shown by nvidia-smi
    bandwidth: float  # of its memory, bytes/s
    half: float  # FLOP/s of fp16, and of bf16 if supported, in tensor cores without sparsity
    tf32: float  # FLOP/s of fp32 matrices in TF32; equal to fp32 without TF32
    fp32: float  # FLOP/s
    shares: Shares
    has_bf16: bool = True


# From 14 rows of V100 and 6 of A100 in docs/reference/step-costs.md (`python bench/step_costs.py published`). On one
# H100 efficientnet_b0 reached 0.60 and bert_large 0.71 (bench/results/gpu-dry-run.json); the band is wider than these.
_VOLTA = Shares(expected=0.69, low=0.61, high=0.90)
_AMPERE = Shares(expected=0.51, low=0.43, high=0.56)
_HOPPER = Shares(expected=0.65, low=0.55, high=0.75)

# NVIDIA's data sheets: "Tesla V100" (January 2020, SXM2), "A100 Tensor Core GPU" (June 2021, SXM), "H100 Tensor Core
# GPU" (SXM; the figures without sparsity are half of the printed ones), "H200 Tensor Core GPU" (SXM).
V100 = Device(
    name="v100",
    memory_bytes=32768 * _MIB,  # the 32 GB version
    bandwidth=900 * _GB,
    half=125 * _TFLOPS,
    tf32=15.7 * _TFLOPS,
    fp32=15.7 * _TFLOPS,
    shares=_VOLTA,
    has_bf16=False,
)
A100 = Device(
    name="a100",
    memory_bytes=81920 * _MIB,  # the 80 GB version
    bandwidth=2039 * _GB,
    half=312 * _TFLOPS,
    tf32=156 * _TFLOPS,
    fp32=19.5 * _TFLOPS,
    shares=_AMPERE,
)
H100 = Device(
    name="h100",
    memory_bytes=81559 * _MIB,
    bandwidth=3350 * _GB,
    half=989 * _TFLOPS,
    tf32=494 * _TFLOPS,
    fp32=67 * _TFLOPS,
    shares=_HOPPER,
)
H200 = replace(H100, name="h200", memory_bytes=143771 * _MIB, bandwidth=4800 * _GB)
DEVICES = {device.name: device for device in (V100, A100, H100, H200)}
