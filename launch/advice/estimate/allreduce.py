"""The time of an all-reduce: ring, tree and two levels, from latency and bandwidth.

Formulas: ring and two levels after Patarasuk and Yuan 2009 and Jia et al. 2018, the tree after Sanders, Speck and
Traeff 2009, with the steps that NCCL counts (src/graph/tuning.cc).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.advice.estimate.hardware import CPU_ACROSS_GB_PER_S, GB, TCP_SHARE, Hardware

Algorithm = Literal["ring", "tree", "two-level"]

# Seconds, from NCCL's tables for its protocol LL128 and, between hosts, Simple, which is used for large sums.
HOP_S: dict[str, float] = {"ring inside": 1.9e-6, "ring across": 14e-6, "tree inside": 1.25e-6, "tree across": 14e-6}
CPU_HOP_S = 60e-6  # a message of ranks on CPUs over TCP: an assumption
# Sums that are neither small nor large are slower than both terms together: nccl-tests on 8 A100 reach 0.63 to 0.85 of
# the bandwidth between 16 and 256 MB (stas00/ml-engineering). The geometric mean of both terms counts so much.
MIXED = 0.7


@dataclass(frozen=True, kw_only=True)
class AllreduceTime:
    """The time of sums over given ranks by one algorithm."""

    algorithm: Algorithm
    latency_s: float
    s_per_byte: float
    work_s_per_byte: float = 0.0  # the part that a rank on a CPU does itself, during which it does not train

    def seconds(self, size: float) -> float:
        """Return the time of a sum of `size` bytes."""
        carried_s = size * self.s_per_byte
        return self.latency_s + carried_s + MIXED * math.sqrt(self.latency_s * carried_s)


def costs(hardware: Hardware, gpus: int) -> tuple[AllreduceTime, ...]:
    """Return the cost of each algorithm over this number of GPUs in full hosts; on one host only the ring."""
    local = min(gpus, hardware.gpus_per_host)
    hosts = math.ceil(gpus / local)
    hop = dict.fromkeys(HOP_S, CPU_HOP_S) if hardware.is_cpu else HOP_S
    inside = 1 / (hardware.inside_gb_per_s * hardware.cores_per_rank * GB)
    copied = inside if hardware.is_cpu else 0.0
    if gpus == 1:
        return (AllreduceTime(algorithm="ring", latency_s=0.0, s_per_byte=0.0),)
    share = 2 * (gpus - 1) / gpus
    if hosts == 1:
        ring_s = hardware.start_s + 2 * (gpus - 1) * hop["ring inside"]
        return (
            AllreduceTime(
                algorithm="ring", latency_s=ring_s, s_per_byte=share * inside, work_s_per_byte=share * copied
            ),
        )
    assert hardware.link_gb_per_s is not None  # who has none is refused before
    across, sent = 1 / (hardware.link_gb_per_s * GB), 0.0
    if hardware.is_cpu:  # over TCP, for which the ranks of a host work together
        sent = 1 / (CPU_ACROSS_GB_PER_S * hardware.cores_per_rank * local * GB)
        across = across / TCP_SHARE + sent
    start_s, levels_s = hardware.start_s, 2 * math.log2(hosts) * hop["tree across"]
    ring_s = start_s + 2 * (gpus - hosts) * hop["ring inside"] + 2 * (hosts - 1) * hop["ring across"]
    tree_s = start_s + 2 * (local - 1) * hop["tree inside"] + levels_s
    two_levels_s = start_s + 2 * (local - 1) * hop["ring inside"] + levels_s
    two_levels, levels_work = (
        2 * (local - 1) / local * within + 2 * (hosts - 1) / hosts * between
        for within, between in ((inside, across), (copied, sent))
    )
    slowest, work = max(inside, across), max(copied, sent)
    return (
        AllreduceTime(algorithm="ring", latency_s=ring_s, s_per_byte=share * slowest, work_s_per_byte=share * work),
        AllreduceTime(algorithm="tree", latency_s=tree_s, s_per_byte=2 * slowest, work_s_per_byte=2 * work),
        AllreduceTime(
            algorithm="two-level", latency_s=two_levels_s, s_per_byte=two_levels, work_s_per_byte=levels_work
        ),
    )


def cheapest(options: Sequence[AllreduceTime], size: float) -> AllreduceTime:
    """Return the fastest algorithm for a sum of `size` bytes."""
    return min(options, key=lambda cost: cost.seconds(size))


def through(times: Sequence[tuple[int, float]]) -> AllreduceTime:
    """Return the curve through the smallest and the largest of measured sums, (bytes, seconds) in increasing order.

    With u = sqrt(latency) and v = sqrt(s_per_byte) a sum of n bytes takes u^2 + MIXED u v sqrt(n) + n v^2: two sums
    give a quadratic equation for u / v. ValueError if a larger sum is not slower.
    """
    (small, small_s), (large, large_s) = times[0], times[-1]
    if large_s <= small_s:
        raise ValueError(f"{large} bytes take {large_s:g} s, not longer than {small} bytes with {small_s:g} s")
    half = MIXED * (math.sqrt(small) * large_s - math.sqrt(large) * small_s) / (large_s - small_s) / 2
    rest = min((small * large_s - large * small_s) / (large_s - small_s), 0.0)  # 0: no latency
    ratio = max(math.sqrt(half**2 - rest) - half, 0.0)
    s_per_byte = large_s / (ratio**2 + MIXED * ratio * math.sqrt(large) + large)
    return AllreduceTime(algorithm="ring", latency_s=ratio**2 * s_per_byte, s_per_byte=s_per_byte)


def calibrated(hardware: Hardware, gpus: int, times: Sequence[tuple[int, float]]) -> Hardware:
    """Return hardware on which sums over `gpus` take the measured times; ValueError if `through` finds no curve.

    On one host this sets its bandwidth, on several hosts the link's.
    """
    if gpus == 1:
        raise ValueError("one GPU sums nothing: measure 2 or more")
    measured = through(times)
    linked = replace(hardware, link_gb_per_s=hardware.link_gb_per_s or hardware.inside_gb_per_s)  # of no effect on hops
    hops_s = min(cost.latency_s for cost in costs(linked, gpus)) - hardware.start_s
    start_s = max(measured.latency_s - hops_s, 0.0)
    reached = 2 * (gpus - 1) / gpus / measured.s_per_byte / GB
    if gpus <= hardware.gpus_per_host:
        return replace(hardware, inside_gb_per_s=reached, start_s=start_s)
    inside = max(reached, hardware.inside_gb_per_s)
    return replace(hardware, link_gb_per_s=reached, inside_gb_per_s=inside, start_s=start_s)
