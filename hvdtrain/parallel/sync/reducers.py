"""Chooses how the ranks sum their gradients."""

from copy import copy
from typing import Literal

from torch import nn

from hvdtrain.parallel.sync.groups import Groups
from hvdtrain.parallel.sync.two_level import TwoLevelSync
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.comm import BUCKET_MB, HorovodComm, ReplicaGroup
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire


def sum_gradients(
    data: ReplicaGroup,
    model: nn.Module,
    wire: Wire,
    *,
    reducer: Literal["bucket", "horovod"] = "bucket",
    groups: int | None = None,
    bucket_mb: float = BUCKET_MB,
    is_sharded: bool = False,
) -> GradientSync:
    """Return the sums of the model's trainable parameters, which are on their device, over the ranks of `data`.

    `groups` applies to Horovod's reducer, which then sends the gradients in that many fixed groups instead of in order
    of arrival. `bucket_mb` (MiB, 0 for each gradient alone) applies to buckets, of which each rank gets a part if
    `is_sharded`.
    """
    if isinstance(data, Groups):
        in_group = sum_gradients(data.group, model, copy(wire), reducer=reducer, groups=groups, bucket_mb=bucket_mb)
        return TwoLevelSync(in_group, model, data.sums.sum_, wire)
    if not isinstance(data, HorovodComm) or data.size == 1:
        return GradientSync()
    if reducer == "horovod":
        from hvdtrain.ranks.distributed_optimizer import HorovodSync  # imports Horovod

        return HorovodSync(model, data, wire, groups=groups)
    if is_sharded:
        from hvdtrain.parallel.sync.sharded import ShardedSync

        return ShardedSync(model, data, wire, bucket_mb=bucket_mb)
    return BucketSync(model, data, wire, bucket_mb=bucket_mb)
