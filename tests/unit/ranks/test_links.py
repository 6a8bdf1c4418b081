from itertools import combinations

import pytest
import torch

from hvdtrain.ranks.links import pair_rounds, time_exchanges


def test_on_one_host_one_pair_after_the_other():
    assert pair_rounds(["h1"] * 4) == [[pair] for pair in combinations(range(4), 2)]


@pytest.mark.parametrize("hosts", [2, 5, 8])
def test_of_several_hosts_every_two_once_and_no_host_twice_in_a_round(hosts):
    names = [f"h{number}" for number in range(hosts) for _ in range(2)]
    found = pair_rounds(names)
    assert len(found) == (hosts if hosts % 2 else hosts - 1)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(0, 2 * hosts, 2), 2))
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_what_comes_is_looked_at():
    pattern = torch.arange(5, dtype=torch.float32)

    def from_rank_3(values, received, other):
        assert other == 3
        received.copy_(pattern[: len(received)] + 3)

    def mirrored(values, received, other):
        received.copy_(values)

    times_s, right = time_exchanges(from_rank_3, pattern, (1, 3), repeats=4)
    assert (len(times_s), right) == (4, True)
    assert not time_exchanges(mirrored, pattern, (1, 3), repeats=4)[1]
