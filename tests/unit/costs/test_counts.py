"""Operators counted on small graphs whose FLOPs and bytes are known by hand."""

import pytest
import torch
from torch.nn import functional

from hvdtrain.costs.absent_gpu import absent_gpu
from hvdtrain.costs.counts import count_bytes

aten = torch.ops.aten


@pytest.fixture
def gpu():
    with absent_gpu() as gpu:
        yield gpu


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_a_linear_layer_by_hand(gpu):
    out = functional.linear(tensor(8, 16), tensor(4, 16), tensor(4))
    [one] = gpu.counts.operations
    assert (out.shape, out.device.type) == ((8, 4), "cuda")
    assert one.flops == 2 * 8 * 16 * 4
    assert one.bytes == 4 * (8 * 16 + 4 * 16 + 4 + 8 * 4)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_and_its_backward_pass_count_their_groups(gpu, groups):
    image, weight = tensor(2, 8, 10, 10), tensor(8, 8 // groups, 3, 3)
    out = functional.conv2d(image, weight, padding=1, groups=groups)
    flops = 2 * out.numel() * (8 // groups) * 9
    gradients = aten.convolution_backward(
        out, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, False]
    )
    forward, backward = gpu.counts.operations
    assert [one.flops for one in (forward, backward)] == [flops, 2 * flops]
    assert [gradient.shape for gradient in gradients[:2]] == [image.shape, weight.shape]
    assert backward.kernels == 2


def test_what_is_overwritten_is_not_read_and_views_cost_nothing(gpu):
    target = tensor(100)
    target.view(10, 10).t()
    target.copy_(tensor(100))
    target.mul_(2)
    assert [(one.name, one.bytes) for one in gpu.counts.operations] == [("aten::copy_", 800), ("aten::mul_", 800)]


def test_an_expanded_tensor_is_read_once(gpu):
    tensor(1, 100).expand(50, 100) + tensor(50, 100)
    assert gpu.counts.bytes == 4 * (100 + 5000 + 5000)


def test_autocast_has_the_lists_of_cuda(gpu):
    with torch.autocast("cuda", torch.bfloat16):
        product = functional.linear(tensor(8, 16), tensor(4, 16))
        normed = functional.layer_norm(product, (4,))
    assert (product.dtype, normed.dtype) == (torch.bfloat16, torch.float32)
    assert gpu.counts.by_name()["aten::_to_copy"] == 3  # of both factors; of the product, for the norm


def test_lists_of_tensors_are_one_kernel_until_they_are_too_many(gpu):
    torch._foreach_mul_([tensor(3) for _ in range(110)], 2.0)
    torch._foreach_mul_([tensor(3) for _ in range(111)], 2.0)
    assert [one.kernels for one in gpu.counts.operations] == [1, 2]


def test_memory_is_held_until_the_last_view_is_gone(gpu):
    before = gpu.memory.live_bytes
    large = tensor(1000)
    view = large[10:]
    del large
    assert gpu.memory.live_bytes - before == 4096  # 4,000 bytes in blocks of 512
    del view
    assert (gpu.memory.live_bytes, gpu.memory.peak_bytes - before) == (before, 4096)


def test_tied_parameters_stay_tied():
    with absent_gpu() as gpu:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        gpu.adopt(model)
        assert model[1].weight is model[0].weight
        assert gpu.memory.live_bytes == 3 * 512


def test_what_torch_was_told_is_taken_back():
    before = torch.cuda.is_available(), torch.cuda.Event
    with absent_gpu():
        assert torch.cuda.is_available()
    assert (torch.cuda.is_available(), torch.cuda.Event) == before


def test_a_lookup_reads_its_rows_and_indices_and_not_the_table():
    table, indices = torch.empty(1000, 8), torch.zeros(5, dtype=torch.int64)
    rows = table[:5]
    moved = count_bytes("aten::embedding", read=[table, indices], changed=[], made=[rows])
    assert moved == 5 * 8 + 2 * rows.nbytes
