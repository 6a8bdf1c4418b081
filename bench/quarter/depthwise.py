"""A candidate: depthwise convolutions of channels_last images in Triton, for half precision.

A program computes a tile of pixels and channels; neighbouring channels are neighbours in memory, so that its loads are
wide. Sums are in fp32. Kernels are 3 or 5 pixels wide, with stride 1 or 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

HIGH, WIDE, CHANNELS = 8, 8, 32  # of a tile
WARPS = 4
PROGRAMS = 2048  # that share the gradient of the weights, at least: several for each multiprocessor


class DepthwiseConv2d(nn.Conv2d):
    """nn.Conv2d with one kernel per channel; on a GPU in half precision and channels_last by Triton."""

    def forward(self, images: Tensor) -> Tensor:  # (N, C, H, W)
        """Convolve each channel with its kernel."""
        autocast = torch.is_autocast_enabled("cuda") and images.is_cuda
        dtype = torch.get_autocast_dtype("cuda") if autocast else images.dtype
        is_fast = images.is_cuda and dtype.itemsize == 2 and images.is_contiguous(memory_format=torch.channels_last)
        if not is_fast:
            return super().forward(images)
        output: Tensor = _Depthwise.apply(images.to(dtype), self.weight, self.stride[0])
        return output


def convert(model: nn.Module) -> None:
    """Replace the convolutions of a model that DepthwiseConv2d can compute."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and _is_known(module):
            module.__class__ = DepthwiseConv2d


def _is_known(conv: nn.Conv2d) -> bool:
    side, stride = conv.kernel_size[0], conv.stride[0]
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and conv.bias is None
        and (side in (3, 5) and conv.kernel_size == (side, side) and conv.padding == (side // 2, side // 2))
        and (stride in (1, 2) and conv.stride == (stride, stride) and conv.dilation == (1, 1))
        and conv.padding_mode == "zeros"
    )


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int) -> Tensor:
        taps = weight.squeeze(1).permute(1, 2, 0).to(images.dtype).contiguous()  # (SIDE, SIDE, C)
        ctx.save_for_backward(images, taps)
        ctx.stride = stride
        height, width = (-(-size // stride) for size in images.shape[2:])
        return gathered(images, taps, height, width, stride=stride, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        images, taps = ctx.saved_tensors
        of_output = of_output.contiguous(memory_format=torch.channels_last)
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            of_images = gathered(of_output, taps, *images.shape[2:], stride=ctx.stride, back=True)
        if ctx.needs_input_grad[1]:
            of_taps = summed(images, of_output, side=len(taps), stride=ctx.stride)
            of_weight = of_taps.permute(2, 0, 1).unsqueeze(1).contiguous()
        return of_images, of_weight, None


def gathered(source: Tensor, taps: Tensor, height: int, width: int, *, stride: int, back: bool) -> Tensor:
    """Return the convolution of (N, C, H, W) with taps (SIDE, SIDE, C), or the gradient of its images if `back`."""
    count, channels = source.shape[:2]
    target = source.new_empty((count, height, width, channels)).permute(0, 3, 1, 2)
    columns = -(-width // WIDE)
    tiles = -(-height // HIGH) * columns
    gather_kernel[(count * tiles, -(-channels // CHANNELS))](
        *(source, taps, target, *source.shape[2:], channels, height, width, columns, tiles),
        SIDE=len(taps), STRIDE=stride, BACK=back, HIGH=HIGH, WIDE=WIDE, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return target


def summed(source: Tensor, gradient: Tensor, *, side: int, stride: int) -> Tensor:
    """Return the gradient of the taps, (SIDE, SIDE, C) in fp32."""
    count, channels = source.shape[:2]
    height, width = gradient.shape[2:]
    columns = -(-width // WIDE)
    tiles = -(-height // HIGH) * columns
    blocks = -(-channels // CHANNELS)
    tiles_each = -(-count * tiles * side * blocks // PROGRAMS)
    chunks = -(-count * tiles // tiles_each)
    target = source.new_empty((chunks, side, side, channels), dtype=torch.float32)
    weights_kernel[(side * chunks, blocks)](
        *(source, gradient, target, count * tiles, tiles_each),
        *(*source.shape[2:], channels, height, width, columns, tiles),
        SIDE=side, STRIDE=stride, HIGH=HIGH, WIDE=WIDE, CHANNELS=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return target.sum(0)


@triton.jit
def gather_kernel(
    source, taps, target, height, width, channels, out_height, out_width, columns, tiles,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pad: tl.constexpr = SIDE // 2
    tile, image = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.arange(0, HIGH * WIDE)
    h = tile // columns * HIGH + pixel // WIDE
    w = tile % columns * WIDE + pixel % WIDE
    is_channel = channel < channels
    source += image * height * width * channels
    total = tl.zeros((HIGH * WIDE, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(SIDE):
        for j in tl.static_range(SIDE):
            if BACK:
                y, x = h + pad - i, w + pad - j
                is_pixel = (y >= 0) & (x >= 0) & (y % STRIDE == 0) & (x % STRIDE == 0)
                y, x = y // STRIDE, x // STRIDE
                is_pixel = is_pixel & (y < height) & (x < width)
            else:
                y, x = STRIDE * h + i - pad, STRIDE * w + j - pad
                is_pixel = (y >= 0) & (y < height) & (x >= 0) & (x < width)
            place = (y * width + x)[:, None] * channels + channel[None, :]
            values = tl.load(source + place, mask=is_pixel[:, None] & is_channel[None, :], other=0.0)
            weight = tl.load(taps + (i * SIDE + j) * channels + channel, mask=is_channel, other=0.0)
            total += values.to(tl.float32) * weight.to(tl.float32)[None, :]
    target += image * out_height * out_width * channels
    is_pixel = (h < out_height) & (w < out_width)
    place = (h * out_width + w)[:, None] * channels + channel[None, :]
    tl.store(target + place, total.to(target.dtype.element_ty), mask=is_pixel[:, None] & is_channel[None, :])


@triton.jit
def weights_kernel(
    source, gradient, target, all_tiles, tiles_each, height, width, channels, out_height, out_width, columns, tiles,
    SIDE: tl.constexpr, STRIDE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pad: tl.constexpr = SIDE // 2
    i, chunk = tl.program_id(0) % SIDE, tl.program_id(0) // SIDE
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.arange(0, HIGH * WIDE)
    is_channel = channel < channels
    sum_0 = tl.zeros((HIGH * WIDE, CHANNELS), dtype=tl.float32)
    sum_1, sum_2, sum_3, sum_4 = sum_0, sum_0, sum_0, sum_0
    tile = chunk * tiles_each
    end = tl.minimum(tile + tiles_each, all_tiles)
    while tile < end:
        image = (tile // tiles).to(tl.int64)
        h = tile % tiles // columns * HIGH + pixel // WIDE
        w = tile % tiles % columns * WIDE + pixel % WIDE
        is_pixel = (h < out_height) & (w < out_width)
        place = image * out_height * out_width * channels + (h * out_width + w)[:, None] * channels + channel[None, :]
        of_output = tl.load(gradient + place, mask=is_pixel[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        y = STRIDE * h + i - pad
        is_row = is_pixel & (y >= 0) & (y < height)
        start = source + image * height * width * channels
        for j in tl.static_range(SIDE):
            x = STRIDE * w + j - pad
            mask = (is_row & (x >= 0) & (x < width))[:, None] & is_channel[None, :]
            values = tl.load(start + (y * width + x)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
            part = values.to(tl.float32) * of_output
            if j == 0:
                sum_0 += part
            elif j == 1:
                sum_1 += part
            elif j == 2:
                sum_2 += part
            elif j == 3:
                sum_3 += part
            else:
                sum_4 += part
        tile += 1
    target += (chunk * SIDE + i) * SIDE * channels + channel
    tl.store(target, tl.sum(sum_0, 0), mask=is_channel)
    tl.store(target + channels, tl.sum(sum_1, 0), mask=is_channel)
    tl.store(target + 2 * channels, tl.sum(sum_2, 0), mask=is_channel)
    if SIDE == 5:
        tl.store(target + 3 * channels, tl.sum(sum_3, 0), mask=is_channel)
        tl.store(target + 4 * channels, tl.sum(sum_4, 0), mask=is_channel)
