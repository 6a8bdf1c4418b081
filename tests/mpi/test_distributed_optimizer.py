"""The optimizer of a run inside Horovod's DistributedOptimizer: it is what it was, and steps as it did."""

import json

import pytest

from hvdtrain.recipe.optim import BUILD
from tests.mpi.conftest import PROGRAMS, end_well


@pytest.fixture(scope="module", params=[1, 2])
def answers(request, tmp_path_factory):
    """What each rank has found, by optimizer and precision."""
    folder = tmp_path_factory.mktemp("wrapped")
    alone = {"HOROVOD_ELASTIC": "1"} if request.param == 1 else {}  # Horovod's hooks, though there is nobody
    end_well(folder, "mpirun", request.param, [str(PROGRAMS / "wrapped.py"), str(folder)], **alone)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", BUILD)
def test_an_optimizer_keeps_all_that_it_is_and_takes_the_same_steps(answers, name, precision):
    """fp16 halves its loss scale at the first step, which is skipped."""
    for rank in answers:
        found = rank[f"{name} {precision}"]
        assert found["horovods"]
        assert found["alike"]
        assert found["scale"] == ([512.0] * 2 if precision == "fp16" else [1.0] * 2)
        assert found["weights"] == found["state"] == 0
        assert found["calls"] == (6 if name in ("sgd", "adam", "adamw") else 5)  # what is not fused skips by itself


@pytest.mark.parametrize("groups", [1, 2])
def test_a_parameter_that_one_rank_does_not_use_holds_up_no_group(answers, groups):
    assert all(rank[f"groups {groups}"] == 0 for rank in answers)
