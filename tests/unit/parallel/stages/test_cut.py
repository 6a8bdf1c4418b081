import itertools
import random

import pytest
import torch

from hvdtrain.core.model import batch_norm
from hvdtrain.parallel.stages.cut import choose_cuts, measure_blocks
from tests.unit.parallel.stages.test_blocks import MODELS


def slowest(times_ms, cuts):
    ends = [0, *cuts, len(times_ms)]
    return max(sum(times_ms[first:end]) for first, end in itertools.pairwise(ends))


@pytest.mark.parametrize("stages", [1, 3, 8])
def test_no_other_cut_has_a_faster_slowest_stage(stages):
    draw = random.Random(stages)  # noqa: S311 (no secret)
    for _ in range(20):
        times_ms = [draw.choice([0.1, 1.0, draw.random(), 5.0]) for _ in range(8)]
        found = choose_cuts(times_ms, stages)
        assert len(found) == stages - 1
        best = min(slowest(times_ms, cuts) for cuts in itertools.combinations(range(1, 8), stages - 1))
        assert slowest(times_ms, found) == pytest.approx(best)


@pytest.mark.parametrize(
    ("kind", "lies"),
    [("effnet", torch.contiguous_format), ("effnet", torch.channels_last), ("mlm", torch.contiguous_format)],
)
def test_measuring_leaves_the_model_as_it_is_and_tells_what_is_handed_on(kind, lies):
    model, blocks, inputs = MODELS[kind]()
    if kind == "effnet":
        inputs = [inputs[0].contiguous(memory_format=lies)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    passages = measure_blocks(model, blocks, inputs, torch.device("cpu"), torch.autocast("cpu", enabled=False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.is_contiguous() for one in model.parameters())
    assert all(one.grad is None for one in model.parameters())
    assert bool(batch_norm.layers(model)) == (kind == "effnet")
    assert all(passage.time_ms > 0 for passage in passages)
    hidden = None
    with torch.no_grad():
        for block, passage in zip(blocks.row[:-1], passages, strict=False):
            hidden = block.run(model, hidden, [one.to(memory_format=lies) if one.dim() == 4 else one for one in inputs])
            room = passage.make_buffer(inputs, blocks.batch_dims, torch.device("cpu"))
            assert (room.shape, room.dtype) == (hidden.shape, hidden.dtype)
            if kind == "effnet" and hidden.shape[2] > 1:
                assert room.is_contiguous(memory_format=lies)
