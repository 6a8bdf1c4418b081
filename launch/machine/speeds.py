"""Speeds of links, by the GPU's name and the CPU's model: GB/s one way, the figures of NCCL's src/graph/topo.h."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.machine.topology import Link

PCIE_GBPS = {3: 12.0, 4: 24.0, 5: 48.0}  # of a x16 slot, by PCIe generation


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds of one GPU's links."""

    nvlink_gbps: float | None = None  # per NVLink
    pcie_gbps: float | None = None  # of its slot


# Model names may be followed by a letter (A10G, L40S, V100S), never by a digit: A10 is not A100.
_GENERATIONS = tuple(
    (re.compile(rf"(?<![A-Z0-9])({models})(?![0-9])"), Speeds(nvlink_gbps=nvlink, pcie_gbps=PCIE_GBPS[pcie]))
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


def speeds_by_name(gpu_name: str) -> Speeds | None:
    """Return the speeds of a GPU by the driver's or a user's spelling of its name; None for an unknown model."""
    name = re.sub(r"[\s_-]+", " ", gpu_name.upper())
    return next((speeds for pattern, speeds in _GENERATIONS if pattern.search(name)), None)


def with_pcie(speeds: Speeds | None, generation: int | None) -> Speeds:
    """Return the speeds with the slot's real PCIe generation, if known."""
    speeds = speeds or Speeds()
    return replace(speeds, pcie_gbps=PCIE_GBPS.get(generation or 0, speeds.pcie_gbps))


def between_sockets(cpuinfo: str) -> float | None:
    """Return the GB/s between the CPU sockets, from the text of /proc/cpuinfo; None for an unknown CPU."""
    facts = dict(re.findall(r"^(vendor_id|cpu family|model|cpu)\s*:\s*(\S+)", cpuinfo, re.MULTILINE))
    vendor = facts.get("vendor_id")
    if vendor == "AuthenticAMD":
        return 16.0
    if facts.get("cpu", "").startswith("POWER9"):
        return 32.0
    if vendor != "GenuineIntel" or facts.get("cpu family") != "6" or not facts.get("model", "").isdecimal():
        return None
    steps = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))  # Emerald Rapids, Sapphire Rapids, Skylake; others are older
    return next((gbps for first, gbps in steps if int(facts["model"]) >= first), 6.0)


def link(kind: str, count: int, ends: Sequence[Speeds], sockets_gbps: float | None) -> Link:
    """Return a link between two GPUs with the speed of its slowest part; no speed if a part is unknown."""
    parts: list[float | None] = []
    if kind == "NV":
        parts = [end.nvlink_gbps and count * end.nvlink_gbps for end in ends]
    elif kind in {"PIX", "PXB", "PHB", "NODE", "SYS"}:
        parts = [end.pcie_gbps for end in ends] + ([sockets_gbps] if kind == "SYS" else [])
    known = [part for part in parts if part is not None]
    return Link(kind=kind, count=count, gbps=round(min(known), 1) if known and len(known) == len(parts) else None)
