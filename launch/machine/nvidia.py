"""NVIDIA's models and their links, its names of GPUs and links, and how a process sees some GPUs only.

nvml.py and nvidia_smi.py read the facts from NVIDIA's tools. launch.run.rank.bind, which imports no other room,
repeats the names of the variables and what a UUID begins with.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"  # of a process: the GPUs that it sees
NONE_VISIBLE = ("", "-1", "NoDevFiles")
UUID = "GPU-"  # what a UUID begins with
_UUID = re.compile(rf"{UUID}([0-9a-f]{{8}})-([0-9a-f]{{4}})-([0-9a-f]{{4}})-([0-9a-f]{{4}})-([0-9a-f]{{12}})")
SLICE = "MIG-"  # what the UUID of a slice begins with
# NCCL: "Duplicate GPU detected", since 2.5 (NVIDIA/nccl issues 418 and 1716).
MIG = (
    f"one process runs on a slice, started without hvdlaunch, with the UUID of the slice (nvidia-smi -L) in {VISIBLE}; "
    "several ranks on slices of one GPU do not, NCCL refuses them"
)
# Points of a link by its kind, NVLink for each, as in NVIDIA's go-gpuallocator.
WEIGHTS = {"X": 0, "SYS": 10, "NODE": 20, "PHB": 30, "PXB": 40, "PIX": 50}
NVLINK = 100
P2P_WORDS = {  # of nvidia-smi topo -p2p
    "OK": "yes",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a driver setting",
    "U": "not known",
}
PCIE_GBPS: Mapping[int, float] = {3: 12.0, 4: 24.0, 5: 48.0}  # of a x16 slot, by PCIe generation
_NVLINKS = {"P100": 4, "V100": 6, "A100": 12, "A800": 8, "H800": 8}  # of one GPU, by a part of its name
_MAX_NVLINKS = 18  # of any other GPU, up to Blackwell
# Models whose boards connect all GPUs by NVLink; the same chips on PCIe cards have other names.
_WIRED = re.compile(r"SXM[3-9]|HBM3|\bG?B[23]00\b|\bH20\b|\bH200\b(?! NVL)")


@dataclass(frozen=True, kw_only=True)
class NcclSpeeds:
    """The speeds of one GPU's links, GB/s one way: the figures of NCCL's src/graph/topo.h."""

    nvlink_gbps: float | None = None  # per NVLink
    pcie_gbps: float | None = None  # of its slot


# Model names may be followed by a letter (A10G, L40S, V100S), never by a digit: A10 is not A100.
_GENERATIONS = tuple(
    (re.compile(rf"(?<![A-Z0-9])({models})(?![0-9])"), NcclSpeeds(nvlink_gbps=nvlink, pcie_gbps=PCIE_GBPS[pcie]))
    for models, nvlink, pcie in (
        (r"BLACKWELL|G?B[123]00|GB10|RTX PRO \d{3,4}|RTX 50[5-9]0", 40.1, 5),
        (r"HOPPER|G?H[128]00|H20", 20.6, 5),
        (r"RTX 40[5-9]0|RTX ?\d{4} (SFF )?ADA|L2|L4|L20|L40", None, 4),
        (r"A10|A16|A2|A40|RTX 30[5-9]0|(RTX )?A[1-6][05]00|RTX A400", 12.0, 4),  # compute capability 8.6
        (r"AMPERE|A100|A800|A30", 20.0, 4),
        (r"TURING|T4|RTX 20[6-8]0|QUADRO RTX \d000|TITAN RTX|VOLTA|G?V100|TITAN V", 20.0, 3),
        (r"PASCAL|G?P100", 18.0, 3),
        (r"P4|P40|P\d{3,4}|T40|T\d{3,4}|GTX (9[5-8]|10[3-8]|16[1-6])0|TITAN XP?|K40|K80|M4|M10|M40|M60", None, 3),
    )
)


def speeds_by_name(gpu_name: str | None) -> NcclSpeeds | None:
    """Return the speeds of a GPU by the driver's or a user's spelling of its name; None for an unknown model."""
    name = re.sub(r"[\s_-]+", " ", (gpu_name or "").upper())
    return next((speeds for pattern, speeds in _GENERATIONS if pattern.search(name)), None)


def most_nvlinks(gpu_name: str | None) -> int:
    """Return the number of NVLinks of a whole GPU."""
    return next((links for part, links in _NVLINKS.items() if part in (gpu_name or "").upper()), _MAX_NVLINKS)


def is_wired(gpu_name: str) -> bool:
    """Return whether boards of this model connect all GPUs by NVLink."""
    return _WIRED.search(gpu_name.upper().replace("_", " ")) is not None


def uuid_digits(uuids: Iterable[str | None]) -> str | None:
    """Return the 32 digits of each UUID, joined; None unless all are UUIDs of whole GPUs."""
    matches = [_UUID.fullmatch(uuid or "") for uuid in uuids]
    return "".join(part for match in matches if match for part in match.groups()) if all(matches) else None
