"""Dropout and attention by few random numbers, compared with torch's."""

import pytest
import torch

from hvdtrain.tasks.text.model import CHANCES, Dropout, _attend, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_values_are_dropped_with_this_probability_and_each_on_its_own(probability, dtype):
    torch.manual_seed(0)
    values = torch.ones(1001, 999, dtype=dtype, requires_grad=True)  # no multiple of the parts
    layer = Dropout(probability)
    left = layer(values)
    left.sum().backward()
    dropped, deviation = left == 0, (probability * (1 - probability) / left.numel()) ** 0.5
    assert abs(dropped.double().mean() - probability) < 5 * deviation + 1 / CHANCES
    grown = torch.tensor(1 / (1 - probability)).to(dtype)
    assert left.dtype == dtype
    assert torch.allclose(left[~dropped], grown, rtol=1e-2)
    assert torch.equal(values.grad, left.detach()), "another mask in backward"
    assert layer.eval()(values) is values
    chances = dropped.flatten()[: dropped.numel() // 4 * 4].view(-1, 4).double() - probability
    between = chances.T @ chances / len(chances) / (probability * (1 - probability))
    assert (between - torch.eye(4)).abs().max() < 0.05, "the parts of a number depend on each other"


@pytest.mark.parametrize("probability", [0.0, 1e-9, 1.0])
def test_a_probability_of_none_or_all_is_torchs(probability):
    values = torch.randn(5, 3)
    assert torch.equal(dropout(values, probability), torch.nn.functional.dropout(values, probability))


def test_attention_without_dropped_weights_is_torchs():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3))
    bias = torch.zeros(2, 1, 1, 7)
    bias[1, ..., 4:] = -torch.inf  # padding
    for given in (bias, None):
        ours = _attend(query, key, value, given, 1e-9)
        torchs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=given)
        torch.testing.assert_close(ours, torchs)
        gradients = [torch.autograd.grad(one.square().sum(), (query, key, value)) for one in (ours, torchs)]
        torch.testing.assert_close(*gradients)


def test_attention_drops_weights_and_keeps_their_expected_sum():
    torch.manual_seed(0)
    query, key = (torch.randn(4, 8, 64, 16) for _ in range(2))
    sums = _attend(query, key, torch.ones_like(key), None, 0.3)[..., 0]
    assert sums.std() > 0.05, "no weight was dropped"
    assert abs(sums.mean() - 1) < 0.02
