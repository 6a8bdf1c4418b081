"""Dry runs held against what others have measured."""

import statistics

import pytest

from bench import step_costs


def test_published_steps_fit_their_memory_and_reach_what_steps_usually_reach():
    """By the page's table, whose rows make docs-check counts anew."""
    table = step_costs.PAGE.read_text().partition("<!-- published:")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    assert len(rows) == len(step_costs.PUBLISHED)
    for *_, gpu, _, _, _, _, memory, _ in rows:
        assert float(memory.split()[0]) <= float(gpu.split()[1]) - 1
    assert 0.55 <= statistics.median(float(row[6]) for row in rows if not row[-1]) <= 0.8


@pytest.mark.slow
def test_parameters_and_state_of_large_models_are_exact():
    sizes = {"b0": 5_288_548, "b4": 19_341_616, "b7": 66_347_960}
    for size, parameters in sizes.items():
        found = step_costs.cost(f"{step_costs.IMAGENET} --model efficientnet_{size} --batch-size-per-rank 2")
        memory = found.memory_bytes
        assert found.parameters == parameters
        assert memory.parameters + memory.optimizer + memory.average == 4 * 3 * parameters


@pytest.mark.slow
def test_b0_moves_fewer_bytes_than_torchvisions_model():
    *_, line = step_costs.beside_torchvision()
    assert float(line.partition("%")[0]) >= 11
