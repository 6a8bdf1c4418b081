import mmap

import psutil

from hvdtrain.insight.tracking import gauges
from tests.steps import CPU


def test_a_peak_stays_when_the_memory_is_given_back():
    [before] = gauges.process_peaks(CPU).values()
    missing = before - psutil.Process().memory_info().rss / 2**20
    with mmap.mmap(-1, (round(missing) + 128) * 2**20) as held:  # more than ever before, by 64 MiB at least
        held[:: mmap.PAGESIZE] = bytes(len(held) // mmap.PAGESIZE)
    assert gauges.process_peaks(CPU)["resident_mib"] > before + 64


def test_the_highest_of_all_ranks_and_who_has_it():
    ranks = [{"resident_mib": 500.0, "gpu_allocated_mib": 9.0}, {"resident_mib": 501.5, "gpu_allocated_mib": 9.0}]
    assert gauges.highest_peaks(ranks) == {
        "resident_mib": 501.5,
        "resident_rank": 1,
        "gpu_allocated_mib": 9.0,
        "gpu_allocated_rank": 0,
    }
