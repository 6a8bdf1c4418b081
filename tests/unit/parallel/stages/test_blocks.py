import copy
from functools import partial

import pytest
import torch
from torch import nn

from hvdtrain.core.blocks import blocks_of
from hvdtrain.core.model.batch_norm import frozen
from hvdtrain.parallel.stages.blocks import compile_blocks, keep_blocks, run_all
from hvdtrain.recipe.sync_batch_norm import convert
from hvdtrain.tasks.text import model as berts
from hvdtrain.tasks.vision import models
from tests.ranks import together


def effnet():
    torch.manual_seed(0)
    model = models.build("efficientnet_tiny", classes=10, dropout=0.0, stochastic_depth=0.0)
    return model, models.blocks(model), (torch.rand(3, 3, 32, 32),)


def bert(kind):
    torch.manual_seed(0)
    sizes = berts.sizes_of("bert_tiny", vocabulary=50)
    model = berts.BertForMaskedLM(sizes) if kind == "mlm" else berts.BertForClassification(sizes, 3)
    tokens = torch.randint(0, 50, (3, 7))
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    places = (torch.tensor([1, 9, 10]),) if kind == "mlm" else ()
    return model.eval(), berts.blocks(model), (tokens, torch.zeros_like(tokens), mask, *places)


MODELS = {
    "effnet": effnet,
    "mlm": lambda: bert("mlm"),
    "classify": lambda: bert("classify"),
}


@pytest.mark.parametrize("kind", ["effnet", "mlm"])
def test_what_is_computed_again_has_the_same_gradients_and_moves_no_statistics_twice(kind):
    model, blocks, inputs = MODELS[kind]()
    model.train()
    other, held = copy.deepcopy(model), []
    for one, recompute in ((model, False), (other, True)):
        bytes_held = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=bytes_held: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            torch.manual_seed(0)  # for dropout
            output = run_all(one, blocks.row, None, inputs, recompute=recompute)
            held.append(sum(bytes_held))
        output.square().sum().backward()
    assert held[1] < held[0] / 4
    assert_equal(model, other)


def assert_equal(model, other):
    for one, again in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, again.grad)
    assert all(torch.equal(one, again) for one, again in zip(model.buffers(), other.buffers(), strict=True))


def test_batch_norm_of_a_single_image_is_that_of_the_first_run():
    """Its mode is another one when the backward pass runs it once more."""
    model, blocks, _ = effnet()
    other = copy.deepcopy(model.train())
    for one, recompute in ((model, False), (other, True)):
        with frozen(one, samples=1):
            output = run_all(one, blocks.row, None, (torch.ones(1, 3, 32, 32),), recompute=recompute)
        output.square().sum().backward()
        assert all(layer.training for layer in one.modules())
    assert_equal(model, other)


def test_what_is_computed_again_sums_over_ranks_again():
    """One of them has a single image."""
    whole, blocks, _ = effnet()

    def program(comm):
        found = []
        for recompute in (False, True):
            model = copy.deepcopy(whole)
            convert(model.train(), comm)
            generator = torch.Generator().manual_seed(comm.rank)
            images = torch.rand(3 - 2 * comm.rank, 3, 32, 32, generator=generator)
            run_all(model, blocks.row, None, (images,), recompute=recompute).square().sum().backward()
            found.append(model)
        assert_equal(*found)

    together(2, program)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, which it hides
@pytest.mark.slow
def test_compiled_blocks_are_compiled_each_and_give_the_same(monkeypatch):
    """More blocks of one kind than torch compiles variants of."""
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes a second to import

    compiled = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(9)), nn.Linear(3, 2))
    other, blocks, inputs = copy.deepcopy(model), blocks_of(model), (torch.rand(5, 3),)
    for one, row in ((model, blocks.row), (other, compile_blocks(blocks.row))):
        run_all(one, row, None, inputs, recompute=True).square().sum().backward()
    assert compiled.frame_count == len(blocks)
    for one, again in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, again.grad)


@pytest.mark.parametrize("kind", MODELS)
def test_parts_have_what_their_blocks_need_under_the_names_of_the_whole(kind):
    whole, blocks, inputs = MODELS[kind]()
    whole.eval()
    expected, hidden, held = whole(*inputs), None, []
    for first, end in [(0, 2), (2, 3), (3, len(blocks))]:
        part = copy.deepcopy(whole)
        keep_blocks(part, blocks.row[first:end])
        held.append(part.state_dict())
        for block in blocks.row[first:end]:
            hidden = block.run(part, hidden, inputs)
            assert block is blocks.row[-1] or hidden.shape[: blocks.batch_dims] == inputs[0].shape[: blocks.batch_dims]
    assert torch.equal(hidden, expected)
    names = [name for own in held for name in own]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == ({"bert.embeddings.word_embeddings.weight"} if kind == "mlm" else set())
    assert list(dict.fromkeys(names)) == list(whole.state_dict())
