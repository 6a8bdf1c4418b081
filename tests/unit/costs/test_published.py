"""Dry runs held against what others have measured; each count takes seconds."""

import statistics

import pytest

from bench import step_costs
from hvdtrain.costs.report import usable_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_published_steps_fit_their_memory_and_reach_what_steps_usually_reach():
    rows = step_costs.PUBLISHED[::3]  # of each program and GPU
    for row in rows:
        assert row.cost.memory_bytes.total <= usable_bytes(row.device), row
    shares = [step_costs.ratio(row) for row in rows if not row.outlier]
    assert 0.55 <= statistics.median(shares) <= 0.8


def test_parameters_and_state_of_large_models_are_exact():
    sizes = {"b0": 5_288_548, "b4": 19_341_616, "b7": 66_347_960}
    for size, parameters in sizes.items():
        found = step_costs.cost(f"{step_costs.IMAGENET} --model efficientnet_{size} --batch-size-per-rank 2")
        memory = found.memory_bytes
        assert found.parameters == parameters
        assert memory.parameters + memory.optimizer + memory.average == 4 * 3 * parameters
