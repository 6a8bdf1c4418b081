"""The links between GPUs of a host and between hosts: named machines, and links in user notation."""

import re
from dataclasses import dataclass

GB = 1e9
START_S = 36e-6  # NCCL's base of 8 us, and 28 us of launch and synchronisation that 8 A100 take besides (nccl-tests)
INSIDE_UNKNOWN_GB_PER_S = 12.0  # one way, as PCIe 3 x16 in NCCL's tables: hosts of which nothing is known
CPU_INSIDE_GB_PER_S = 3.0  # sums of 2 ranks on CPUs: 64 MB in 19.6 ms, 256 MB in 81.5 ms (docs: benchmarks)
CPU_ACROSS_GB_PER_S = 1.1  # that a core copies and adds in a sum over TCP: 16 MB in 14 ms (docs: benchmarks)
TCP_SHARE = 1448 / 1514  # of a link that carries data: an Ethernet frame without its headers


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A host and its links to other hosts."""

    name: str
    gpus_per_host: int
    inside_gb_per_s: float  # per direction and GPU, reached by a large all-reduce
    link_gb_per_s: float | None  # of a host and direction, all network cards together; None if unknown
    device: str | None = None  # the GPU's name in --dry-run
    memory_gb: float | None = None  # of a GPU
    is_cpu: bool = False
    cores_per_rank: float = 1.0  # of ranks on CPUs, whose sums take them from the training
    start_s: float = START_S  # of an all-reduce, before the first byte


# Name: GPU, its GB, GPUs of a host, GB/s inside, network cards for GPUs x Gbit/s of each, by their makers (NVIDIA
# DGX; AWS p4d and p5; Google Cloud A3 High, of whose 1,000 Gbit/s 200 are the host's).
# Inside: NVLinks of a GPU x GB/s of each in NCCL's tables (V100 and A100 20, H100 20.6), of which a ring reaches 98 %
# (234.9 of 240 on A100, 367.6 of 371 on H100).
_MACHINES = {
    "dgx1-v100": ("v100", 32, 8, 118, 4, 100),
    "dgx2-v100": ("v100", 32, 16, 118, 8, 100),
    "dgx-a100": ("a100", 80, 8, 235, 8, 200),
    "p4d": ("a100", 40, 8, 235, 4, 100),
    "dgx-h100": ("h100", 80, 8, 367, 8, 400),
    "dgx-h200": ("h200", 141, 8, 367, 8, 400),
    "p5": ("h100", 80, 8, 367, 32, 100),
    "a3": ("h100", 80, 8, 367, 4, 200),
}
MACHINES = {
    name: Hardware(
        name=name,
        gpus_per_host=gpus,
        inside_gb_per_s=inside,
        link_gb_per_s=cards * gbit / 8,
        device=device,
        memory_gb=memory_gb,
    )
    for name, (device, memory_gb, gpus, inside, cards, gbit) in _MACHINES.items()
}

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIZES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> float:
    """Parse 200gbit or 8x200gbit to GB/s per host and direction; ValueError for anything else, and for 0."""
    found = re.fullmatch(r"(?:([0-9]{1,3})x)?([0-9]{1,9}(?:\.[0-9]+)?)([kmg]bit)", text.lower())
    rate = float(found[2]) * int(found[1] or 1) * _RATES[found[3]] / 8 / GB if found else 0.0
    if rate <= 0:
        raise ValueError(
            f"{text!r} is not a link. Pass its speed per host and direction, for example 8x200gbit or 100mbit."
        )
    return rate


def parse_times(text: str) -> tuple[tuple[int, float], ...]:
    """Parse 1M=186us,1G=2760us to increasing bytes with seconds; ValueError for other text or fewer than two sizes."""
    times = {}
    for word in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})([BKMG]?)=([0-9]{1,9}(?:\.[0-9]+)?)(us|ms|s)", word)
        if not found or not int(found[1]) or not float(found[3]):
            raise ValueError(f"{word!r} is not the time of a size. Pass --allreduce 1M=186us,1G=2760us.")
        times[int(found[1]) * _SIZES[found[2]]] = float(found[3]) * _TIMES[found[4]]
    if len(times) < 2:
        raise ValueError(f"{text!r} has one size. Pass two, for example 1M=186us,1G=2760us.")
    return tuple(sorted(times.items()))
