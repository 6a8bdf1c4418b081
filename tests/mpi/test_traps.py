"""Each trap of Horovod's that a training step can fall into: the naive code falls, ours does not.

The naive half keeps the test honest: where a newer Horovod mends a trap, the test says so.
"""

import json
import math

import pytest

from tests.mpi.conftest import PROGRAMS, end_well

OF_TWO_RANKS = (
    *("zero_grad_to_none", "inf_on_one_rank_under_amp", "fp16_overflow", "joined_ranks"),
    "batch_norm_statistics",
)


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """What each rank has seen of a trap."""
    folder = tmp_path_factory.mktemp("traps")
    end_well(folder, "mpirun", 2, [str(PROGRAMS / "traps.py"), str(folder), *OF_TWO_RANKS])
    seen = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return lambda name: [of_rank[name] for of_rank in seen]


def test_zero_grad_to_none(trap):
    for answer in trap("zero_grad_to_none"):
        assert answer["naive"].startswith("TypeError")
        assert answer["ours"] is None
        assert answer["cleared"]


def test_infinity_on_one_rank_lowers_every_loss_scale(trap):
    first, second = trap("inf_on_one_rank_under_amp")
    assert first["naive"] != second["naive"]
    assert first["ours"] == second["ours"] == [512.0, 1]
    assert first["finite"]
    assert second["finite"]


def test_fp16_sums_do_not_overflow_where_the_mean_does_not(trap):
    for answer in trap("fp16_overflow"):
        assert math.isinf(answer["naive_plain"])
        assert math.isinf(answer["naive_groups"])  # groups ignore the divisor
        assert answer["ours_plain"] == 40000.0
        assert answer["ours_groups"] == 40000.0


def test_ranks_without_data_do_not_dilute_the_mean(trap):
    first, second = trap("joined_ranks")
    assert first["naive"] == 0.5
    assert first["ours"] < 1e-6
    assert second["ours"] < 1e-6


def test_every_rank_evaluates_with_the_same_batch_norm_statistics(trap):
    first, second = trap("batch_norm_statistics")
    assert first["naive"] != second["naive"]
    assert first["ours"] == second["ours"]
    assert first["ours"] == pytest.approx([(a + b) / 2 for a, b in zip(first["naive"], second["naive"], strict=True)])
    assert first["loss"] == second["loss"]
