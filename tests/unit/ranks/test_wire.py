import pytest
import torch
from torch import nn

from hvdtrain.parallel.sync.reducers import sum_gradients
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.distributed_optimizer import WireCompressor
from hvdtrain.ranks.wire import GROWTH_STEPS, Wire, bits


def travelled(wire, *of_ranks):
    """The sum over ranks as it comes off the wire."""
    compressor = WireCompressor(wire)
    sent = [compressor.compress(gradient) for gradient in of_ranks]
    return compressor.decompress(sum(tensor for tensor, _ in sent), sent[0][1])


def zeros(wire, gradients):
    return int((travelled(wire, gradients) == 0).sum())


def test_no_more_gradients_vanish_on_many_ranks_than_on_one():
    gradients = torch.logspace(-9, 0, 1000)  # as those of a model that has learned a little
    assert zeros(Wire(1024, is_half=True), gradients / 1024) == zeros(Wire(1, is_half=True), gradients) < 200
    assert zeros(Wire(1, is_half=True), gradients / 1024) > 400  # without a scale


@pytest.mark.parametrize(("ranks", "scale"), [(1, 1), (7, 4), (8, 8), (1000, 512)])
def test_the_scale_is_the_largest_power_of_two_that_the_ranks_hold(ranks, scale):
    assert (Wire(ranks, is_half=True).scale, Wire(ranks, is_half=False).scale) == (scale, 1)


@pytest.mark.parametrize(
    ("compression", "dtype"), [("none", torch.bfloat16), ("fp16", torch.float32), ("fp16", torch.float16)]
)
def test_a_sum_comes_back_in_shape_layout_and_type(compression, dtype):
    generator = torch.Generator().manual_seed(0)
    kernels = torch.randint(-8, 9, (2, 4, 3, 5, 5), generator=generator).to(dtype)
    one, other = (kernel.contiguous(memory_format=torch.channels_last) for kernel in kernels)
    total = travelled(Wire(6, is_half=compression == "fp16"), one, other)
    assert torch.equal(total, one + other)
    assert total.dtype == dtype
    assert total.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(one, kernels[0])  # not scaled in place


def test_an_overflow_halves_the_scale_until_the_sum_fits():
    wire = Wire(8, is_half=True)
    of_ranks = [torch.full((2,), 20480.0 / 8)] * 8  # 20480 together, 163840 at a scale of 8
    sums = []
    for _ in range(5):
        sums.append(travelled(wire, *of_ranks)[0].item())
        wire.end_step(overflowed=sums[-1] == torch.inf)
    assert sums == [torch.inf, torch.inf, 20480.0, 20480.0, 20480.0]


def scales(wire, *overflows):
    """The scale after each of these steps."""
    found = []
    for overflowed in overflows:
        wire.end_step(overflowed=overflowed)
        found.append(wire.scale)
    return found


def test_the_scale_grows_back_to_its_start_and_no_further():
    wire = Wire(4, is_half=True)
    assert torch.amp.GradScaler("cpu").get_growth_interval() == GROWTH_STEPS
    assert scales(wire, True, True) == [2.0, 1.0]
    calm = [False] * (GROWTH_STEPS - 1)
    assert set(scales(wire, *calm)) == {1.0}
    assert scales(wire, False) == [2.0]
    assert scales(wire, *calm, True) == [2.0] * len(calm) + [1.0]  # an overflow begins the count anew
    wire = Wire(4, is_half=True)
    assert set(scales(wire, *calm, False)) == {4.0}


def test_a_wire_that_does_not_scale_does_not_mind_an_overflow():
    wire = Wire(8, is_half=False)
    assert scales(wire, True, False) == [1.0, 1.0]
    assert scales(Wire(2, is_half=True), True, True) == [1.0, 0.5]
    later = Wire(8, is_half=True)
    later.load_state_dict(wire.state_dict())  # resumed with another --compression
    assert scales(later, False) == [8.0]


def test_a_checkpoint_brings_back_scale_and_count():
    wire = Wire(16, is_half=True)
    scales(wire, True, True, *[False] * (GROWTH_STEPS - 1))
    again = Wire(16, is_half=True)
    again.load_state_dict(wire.state_dict())
    assert scales(again, False, True) == scales(wire, False, True) == [8.0, 4.0]


def test_what_one_rank_has_saved_without_horovod_lets_one_with_it_begin():
    """A plain process, continued under mpirun -np 1."""
    alone = sum_gradients(SerialComm(), nn.Linear(1, 1), Wire(1, is_half=True))
    wire = Wire(1, is_half=True)
    wire.load_state_dict(alone.state_dict())
    assert scales(wire, True) == [0.5]


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
