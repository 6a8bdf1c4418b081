import pytest
import torch

from hvdtrain.ranks.wire import bits

INTEGERS = [torch.uint8, torch.int16, torch.int32, torch.int64]  # that both Horovod and MPI can send
TYPES = ["bool", "uint8", "int16", "uint32", "int64", "float16", "bfloat16", "float64"]
TYPES += ["complex64", "complex128", "float8_e4m3fn"]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("name", TYPES)
def test_bits_share_the_memory_of_a_tensor_of_any_type(name, shape):
    one, other = (torch.full(shape, value).to(getattr(torch, name)) for value in (0, 1))
    assert bits(one).dtype in INTEGERS
    bits(one).copy_(bits(other))
    assert torch.equal(bits(one), bits(other))
    assert one.tolist() == other.tolist()


def test_a_tensor_in_any_order_has_bits():
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    bits(images).fill_(1)
    assert images.view(torch.int32).eq(1).all()
