"""hvdlaunch's plan by rank, for placement.json."""

import base64
import json
import zlib
from typing import Any
from uuid import UUID


def read_plan(text: str | None) -> dict[str, Any] | None:
    """Decode HVDLAUNCH_PLAN, with all facts of each rank in `ranks`; None without a plan."""
    if text is None:
        return None
    plan: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    ranks: list[dict[str, Any]] = []
    for host in plan.pop("hosts"):
        digits = host.pop("gpu_uuids", "")  # of NVIDIA's UUIDs, 32 per rank
        for local_rank, facts in enumerate(host.pop("ranks")):
            rank = {"rank": len(ranks), "local_rank": local_rank, **host, **facts}
            if digits:
                rank["gpu_uuid"] = f"GPU-{UUID(digits[32 * local_rank : 32 * local_rank + 32])}"
            ranks.append(rank)
    return {**plan, "ranks": ranks}
