"""Dry runs held against what others have measured; each count takes seconds."""

import statistics

import pytest

from bench import step_costs
from hvdtrain.insight.costs.report import usable_bytes

# Two minutes of a core; make docs-check counts some of the steps.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def test_published_steps_fit_their_memory_and_reach_what_steps_usually_reach():
    rows = step_costs.PUBLISHED[::3]  # of each program and GPU
    for row in rows:
        assert row.cost.memory_bytes.total <= usable_bytes(row.device), row
    shares = [step_costs.ratio(row) for row in rows if not row.outlier]
    assert 0.55 <= statistics.median(shares) <= 0.8
