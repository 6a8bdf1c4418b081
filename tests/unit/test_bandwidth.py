import argparse

import pytest
import torch

from hvdtrain import bandwidth
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from tests.refusals import refused, require_facts


def test_sizes_are_read():
    assert bandwidth.parse(["--sizes", "4,64mb, 4GB "]).sizes == (4, 64 * 2**20, 4 * 2**30)


@pytest.mark.parametrize("word", ["", "0", "6", "1TB", "5GB", "64MB;", "٤KB"])
def test_other_sizes_are_refused(word):
    with pytest.raises(BadInput, match=r"^--sizes '.*': .*multiple of 4 bytes up to 4GB.* 16MB"):
        bandwidth.parse_sizes(word)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--over", "ours,nccl"], "--over 'nccl' ... ours, mpi4py, gloo"),
        (["--over", "ours,ours"], "--over ours,ours ... once"),
        (["--repeats", "1"], "--repeats 1 ... at least 2"),
        (["--limit-s", "nan"], "--limit-s nan: ... more than 0"),
        (["--json", "nowhere/report.json"], "--json nowhere/report.json: ... folder nowhere"),
        (["--json", "/"], "--json /: a folder"),
    ],
)
def test_other_words_are_refused(words, facts):
    require_facts(refused(lambda: bandwidth.parse(words)), facts)


class Two(SerialComm):
    size = local_size = 2


def memory(free):
    """In place of psutil, for this module alone: other threads look at the real one."""
    return argparse.Namespace(virtual_memory=lambda: argparse.Namespace(available=free))


def test_what_does_not_fit_into_memory_is_refused(monkeypatch):
    free = 2 * 256 * 2**20 * bandwidth.COPIES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bandwidth, "psutil", memory(free))
    assert bandwidth.usable_device(Two(), bandwidth.parse([])).type == "cpu"
    monkeypatch.setattr(bandwidth, "psutil", memory(free - 1))
    with pytest.raises(BadInput, match=r"^--sizes 256MB: .*memory.* 255MB\.$"):
        bandwidth.usable_device(Two(), bandwidth.parse([]))


@pytest.mark.parametrize(("ranks", "bus"), [(2, 1.0), (8, 1.75)])
def test_the_bus_carries_what_a_ring_sends(ranks, bus):
    line = bandwidth.summarize_times("ours", 10**9, ranks, [1.0, 1.0, 4.0])
    assert (line.median_s, line.algorithm_gb_per_s, line.bus_gb_per_s) == (1.0, 1.0, bus)


@pytest.mark.parametrize("ranks", [2, 1000])
def test_a_sum_is_right_or_wrong_in_a_single_value(ranks):
    pattern = torch.arange(251.0)
    total = pattern * ranks + sum(range(ranks))
    assert bandwidth.is_sum(total.clone(), pattern, ranks)
    total[100] += 1
    assert not bandwidth.is_sum(total, pattern, ranks)


def test_sizes_that_would_take_too_long_are_left_out():
    words = bandwidth.parse(["--repeats", "5", "--limit-s", "10"])
    lines = [bandwidth.summarize_times("ours", size, 2, [size / 1e8] * 5) for size in (10**6, 10**7)]  # 0.55 s
    assert bandwidth.is_within(words, [], 2**30)
    assert bandwidth.is_within(words, lines, 13 * 10**7)  # 7 of 1.3 s
    assert not bandwidth.is_within(words, lines, 14 * 10**7)
    assert not bandwidth.is_within(words, [bandwidth.summarize_times("ours", 1024, 2, [2.1] * 5)], 4)
    assert bandwidth.is_within(bandwidth.parse([]), lines, 2**30)
