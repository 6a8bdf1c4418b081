from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from hvdtrain.recipe import optim
from hvdtrain.tasks.text.model import BertForMaskedLM, _for_three, freeze_embeddings, sizes_of
from tests.unit.tasks.text.berts import SIZES, batch, classifier, masked_lm


@pytest.mark.parametrize(
    ("name", "layers", "millions", "tensors"),
    [
        ("bert_tiny", 2, 4.42, 42),
        ("bert_base", 12, 109.5, 202),
    ],
)
def test_sizes_by_name_are_berts(name, layers, millions, tensors):
    with torch.device("meta"):
        parameters = list(BertForMaskedLM(sizes_of(name, vocabulary=30522)).parameters())
    assert len(parameters) == tensors == 10 + 16 * layers
    assert sum(parameter.numel() for parameter in parameters) == pytest.approx(millions * 1e6, rel=0.005)


def test_logits_are_those_of_the_places_asked_for():
    model, (tokens, types, mask) = masked_lm(), batch()
    every = model(tokens, types, mask, torch.arange(mask.numel()))
    places = torch.tensor([11, 2, 0, 2])
    assert every.shape == (27, SIZES.vocabulary)
    torch.testing.assert_close(model(tokens, types, mask, places), every[places])


@pytest.mark.parametrize(("build", "sequences"), [(masked_lm, 0), (masked_lm, 2), (classifier, 0)])
def test_no_sequence_or_no_masked_token_has_gradients_of_zero(build, sequences):
    model = build().train()
    inputs = [tensor[:sequences] for tensor in batch()]
    places = [torch.zeros(0, dtype=torch.int64)] if build is masked_lm else []
    logits = model(*inputs, *places)
    functional.cross_entropy(logits, torch.zeros(0, dtype=torch.int64), reduction="sum").backward()
    assert len(logits) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_dropout_is_everywhere_and_only_in_training():
    model, inputs = classifier(sizes=replace(SIZES, dropout=0.5)), batch()
    assert torch.equal(model(*inputs), model(*inputs))
    model.train()
    assert not torch.equal(model(*inputs), model(*inputs))
    attention = model.bert.encoder["layer"][0].attention["self"]
    hidden, mask = torch.randn(1, 5, SIZES.width), torch.ones(1, 1, 1, 5, dtype=torch.bool)
    assert not torch.equal(attention(hidden, mask), attention(hidden, mask))


def test_a_fresh_model_has_the_deviation_that_it_was_asked_for():
    torch.manual_seed(0)
    state = BertForMaskedLM(SIZES).state_dict()
    for name, value in state.items():
        if name.endswith("LayerNorm.weight"):
            assert (value == 1).all(), name
        elif value.ndim == 1:
            assert not value.any(), name
        else:
            assert value.std().item() == pytest.approx(0.3, rel=0.15), name


def test_frozen_embeddings_are_left_out_of_every_step():
    model = masked_lm()
    freeze_embeddings(model)
    groups = optim.parameter_groups(model, 0.01, decay_all=False)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    left_out = {name for name, parameter in model.named_parameters() if id(parameter) not in trained}
    assert left_out == {
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.bias",
    }
    model(*batch(), torch.arange(3)).sum().backward()
    assert model.bert.embeddings.word_embeddings.weight.grad is None


def test_hidden_states_are_cast_once_for_three_layers_and_their_gradients_summed_in_fp32():
    hidden = torch.randn(64, 8, requires_grad=True)
    weights = torch.randn(3, 8, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        three = _for_three(hidden)
    sum((one @ weight).float().square().sum() for one, weight in zip(three, weights, strict=True)).backward()
    found, hidden.grad = hidden.grad, None
    sum((hidden.bfloat16() @ weight).float().square().sum() for weight in weights).backward()
    assert {one.data_ptr() for one in three} == {three[0].data_ptr()}
    torch.testing.assert_close(found, hidden.grad, rtol=1e-6, atol=1e-5)
    assert _for_three(hidden)[0] is hidden  # in fp32 there is nothing to cast
