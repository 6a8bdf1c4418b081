"""GPUs by name, with their makers' peak figures."""

from dataclasses import dataclass

_MIB, _GB, _TFLOPS = 2**20, 10**9, 10**12


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU's peaks."""

    name: str
    memory_bytes: int  # as shown by nvidia-smi
    bandwidth: float  # of its memory, bytes/s
    half: float  # FLOP/s of fp16, and of bf16 if supported, in tensor cores without sparsity
    tf32: float  # FLOP/s of fp32 matrices in TF32; equal to fp32 without TF32
    fp32: float  # FLOP/s
    has_bf16: bool = True

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of matrices of this precision: fp32, tf32, fp16 or bf16."""
        return {"fp32": self.fp32, "tf32": self.tf32}.get(precision, self.half)


# NVIDIA's data sheets: "Tesla V100" (January 2020, SXM2), "A100 Tensor Core GPU" (June 2021, SXM), "H100 Tensor Core
# GPU" (SXM; the figures without sparsity are half of the printed ones), "H200 Tensor Core GPU" (SXM).
V100 = Device(
    name="v100",
    memory_bytes=32768 * _MIB,  # the 32 GB version
    bandwidth=900 * _GB,
    half=125 * _TFLOPS,
    tf32=15.7 * _TFLOPS,
    fp32=15.7 * _TFLOPS,
    has_bf16=False,
)
A100 = Device(
    name="a100",
    memory_bytes=81920 * _MIB,  # the 80 GB version
    bandwidth=2039 * _GB,
    half=312 * _TFLOPS,
    tf32=156 * _TFLOPS,
    fp32=19.5 * _TFLOPS,
)
H100 = Device(
    name="h100",
    memory_bytes=81559 * _MIB,
    bandwidth=3350 * _GB,
    half=989 * _TFLOPS,
    tf32=494 * _TFLOPS,
    fp32=67 * _TFLOPS,
)
H200 = Device(
    name="h200",
    memory_bytes=143771 * _MIB,
    bandwidth=4800 * _GB,
    half=989 * _TFLOPS,
    tf32=494 * _TFLOPS,
    fp32=67 * _TFLOPS,
)
DEVICES = {device.name: device for device in (V100, A100, H100, H200)}
