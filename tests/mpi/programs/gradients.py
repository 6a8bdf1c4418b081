"""What a GradientSync makes of gradients that differ by rank; argv: folder, none|fp16, horovod|bucket."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hvdtrain.parallel.sync.reducers import sum_gradients
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
comm.start()
share = 1 / comm.size
HASHED = 100


def sync_of(model: nn.Module, **options: Any) -> GradientSync:
    wire = Wire(comm.size, is_half=sys.argv[2] == "fp16")
    sync = sum_gradients(comm, model, wire, **{"reducer": sys.argv[3], **options})
    sync._shares_cores = False  # Horovod's hooks send, as on GPUs
    return sync


def synced(model: nn.Module, losses: list[torch.Tensor]) -> dict[str, list[float]]:
    sync = sync_of(model)
    found = []
    for overlap in (True, True, False):  # buckets know their order in the second step
        sync.overlap = overlap
        model.zero_grad()
        sync.expect(max(1, len(losses)))
        for loss in losses:
            loss.backward(retain_graph=True)
        sync.finish()
        parameters = model.named_parameters()
        found.append({name: one.grad.flatten().tolist() for name, one in parameters if one.grad is not None})
    assert found[0] == found[1] == found[2]
    return found[0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.zeros(4))
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


def channels_last() -> bool:
    """Whether a convolution's gradient over ranks equals the one computed here from all ranks' images."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    images = torch.rand(comm.size, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    sync = sync_of(conv)
    sync.expect(1)
    conv(images[comm.rank : comm.rank + 1]).square().sum().backward()
    sync.finish()
    summed = conv.weight.grad.clone()
    conv.zero_grad()
    alone = nn.Conv2d(3, 5, 3)
    alone.load_state_dict(conv.state_dict())
    alone(images).square().sum().backward()
    return bool(torch.allclose(summed, alone.weight.grad, rtol=2e-3, atol=1e-2))


def empty_share_of_channels_last() -> list[float]:
    """The last rank has no images, so no gradient of its own."""
    conv = nn.Conv2d(3, 2, 3, bias=False).to(memory_format=torch.channels_last)
    kernel = torch.arange(conv.weight.numel(), dtype=torch.float32).view_as(conv.weight)
    here = comm.rank < comm.size - 1
    return synced(conv, [(conv.weight * kernel).sum()] if here else [])["weight"]


def sums_of_large_gradients() -> list[list[float]]:
    """Step by step; their mean over ranks is 40000, which fits into fp16; the sum of as much from each does not."""
    model = Two()
    sync = sync_of(model)
    found = []
    for _ in range(3):
        model.zero_grad()
        sync.expect(1)
        (model.used * 40000.0 * share).sum().backward()
        sync.finish()
        assert model.used.grad is not None
        found.append(model.used.grad.tolist())
        sync.end_step(overflowed=not torch.isfinite(model.used.grad).all())
    return found


def hashes_of_a_step_in_groups(parameters: int) -> list[float]:
    """How often a parameter was hashed, by the number of groups; whatever looks through a group hashes all of it."""
    found = []
    for groups in (1, 3):
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(parameters)])
        sync = sync_of(model, reducer="horovod", groups=groups)
        for _ in range(2):
            model.zero_grad()
            sync.expect(1)
            loss = sum(number * one.sum() for number, one in enumerate(model))
            with patch.object(torch.Tensor, "__hash__", autospec=True, side_effect=id) as hashed:
                loss.backward()
                sync.finish()
            assert [one.grad.item() for one in model] == [float(comm.size * number) for number in range(parameters)]
        found.append(hashed.call_count)
    return found


plain, passes, uneven = Two(), Two(), Two()
answer = {
    "large": sums_of_large_gradients(),
    "plain": synced(plain, [(plain.used * 3.0 * share).sum()]),
    "three_passes": synced(passes, [(passes.used * (comm.rank + 1.0)).sum() for _ in range(3)]),
    "uneven_passes": synced(uneven, [uneven.used.sum() for _ in range(comm.rank + 1)]),
    "channels_last": channels_last(),
    "hashes": hashes_of_a_step_in_groups(HASHED),
    "empty_share": empty_share_of_channels_last(),
}
(Path(sys.argv[1]) / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
