"""Operators counted on small graphs whose FLOPs and bytes are known by hand."""

import pytest
import torch
from torch.nn import functional

from hvdtrain.insight.costs.absent_gpu import absent_gpu
from hvdtrain.insight.costs.counts import count_bytes

aten = torch.ops.aten


@pytest.fixture
def gpu():
    before = torch.cuda.is_available(), torch.cuda.Event
    with absent_gpu() as gpu:
        yield gpu
    assert (torch.cuda.is_available(), torch.cuda.Event) == before


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def names(gpu):
    return [one.name for one in gpu.operations]


def test_a_linear_layer_by_hand(gpu):
    out = functional.linear(tensor(8, 16), tensor(4, 16), tensor(4))
    [one] = gpu.operations
    assert (out.shape, out.device.type) == ((8, 4), "cuda")
    assert one.flops == 2 * 8 * 16 * 4
    assert one.bytes == 4 * (8 * 16 + 4 * 16 + 4 + 8 * 4)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_and_its_backward_pass_count_their_groups(gpu, groups):
    image, weight = tensor(2, 8, 10, 10), tensor(8, 8 // groups, 3, 3).requires_grad_()
    out = functional.conv2d(image.requires_grad_(), weight, padding=1, groups=groups)
    out.backward(torch.zeros_like(out))
    flops = 2 * out.numel() * (8 // groups) * 9
    forward, _, backward = gpu.operations
    assert [one.flops for one in (forward, backward)] == [flops, 2 * flops]
    assert (image.grad.shape, weight.grad.shape, backward.kernels) == (image.shape, weight.shape, 2)


def test_what_is_overwritten_is_not_read_and_views_cost_nothing(gpu):
    target = tensor(100)
    target.view(10, 10).t().detach()
    target.copy_(tensor(100))
    target.mul_(2)
    assert [(one.name, one.bytes) for one in gpu.operations] == [("aten::copy_", 800), ("aten::mul_", 800)]


def test_autocast_has_the_lists_of_cuda(gpu):
    with torch.autocast("cuda", torch.bfloat16):
        product = functional.linear(tensor(8, 16), tensor(4, 16))
        normed = functional.layer_norm(product, (4,))
    assert (product.dtype, normed.dtype) == (torch.bfloat16, torch.float32)
    assert names(gpu).count("aten::_to_copy") == 3  # of both factors; of the product, for the norm


def test_a_backward_pass_adds_gradients_and_releases_what_was_saved(gpu):
    weight, image = tensor(128).requires_grad_(), tensor(128)
    loss = ((weight * image).relu() + weight * 2).sum()
    gpu.memory.restart()
    loss.backward()
    assert weight.grad.shape == weight.shape
    assert gpu.memory.live_bytes == gpu.memory.forward_bytes  # a gradient has come, what relu had saved is gone
    (weight * 3).sum().backward()
    assert names(gpu)[-1] == "aten::add_"


def test_memory_is_held_until_the_last_view_is_gone(gpu):
    before = gpu.memory.live_bytes
    large = tensor(1000)
    view = large[10:]
    del large
    assert gpu.memory.live_bytes - before == 4096  # 4,000 bytes in blocks of 512
    del view
    assert (gpu.memory.live_bytes, gpu.memory.peak_bytes - before) == (before, 4096)


def test_tied_parameters_stay_tied(gpu):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, device="meta"), torch.nn.Linear(3, 3, device="meta"))
    model[1].weight = model[0].weight
    gpu.adopt(model)
    assert model[1].weight is model[0].weight
    assert gpu.memory.live_bytes == 3 * 512


def test_the_host_computes_with_its_own_values_and_reads_zeros_of_the_gpu(gpu):
    assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
    assert torch.arange(3).pin_memory().to("cuda").cpu().tolist() == [0, 0, 0]
    assert torch.ones(2, device="cuda").sum().item() == 0


def test_a_lookup_reads_its_rows_and_indices_and_not_the_table():
    table, indices = torch.empty(1000, 8), torch.zeros(5, dtype=torch.int64)
    rows = table[:5]
    moved = count_bytes("aten::embedding", read=[table, indices], changed=[], made=[rows])
    assert moved == 5 * 8 + 2 * rows.nbytes
