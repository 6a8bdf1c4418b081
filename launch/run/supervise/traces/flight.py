"""The last collectives of a script's own torch.distributed, from the dumps of torch's flight recorder.

hvdlaunch turns the recorder on (run/rank/bind.py). After a time-out of NCCL each rank dumps its calls, pickled lists
and dicts of numbers and texts: version 2.10 of torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from launch.errors import harmless
from launch.run.supervise.traces.calls import WORLD, Call, Groups, is_library

DEFAULT_GROUP = "default_pg"
OF_ONE_SHAPE = ("all_reduce", "broadcast")  # on all ranks


class _Plain(pickle.Unpickler):
    """Reads a pickle of plain values; one that names a class or function is an error."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"the dump names {module}.{name}")


def parse_dump(content: bytes) -> Groups:
    """Parse the dump of a rank up to the first call that has not ended; empty if it is none."""
    groups: dict[str, dict[int, Call]] = {}
    ended: set[str] = set()
    try:
        for entry in _Plain(io.BytesIO(content)).load()["entries"]:
            group = WORLD if entry["process_group"][1] == DEFAULT_GROUP else harmless(" ".join(entry["process_group"]))
            if not entry["is_p2p"] and group not in ended:
                call = _call(entry, group)
                groups.setdefault(group, {})[call.number] = call
                if call.waits:
                    ended.add(group)
    except Exception:  # noqa: BLE001 (a torn or strange file: unpickling raises anything)
        return {}
    return groups


def _call(entry: Mapping[str, Any], group: str) -> Call:
    _, _, kind = str(entry["profiling_name"]).rpartition(":")
    frames = [frame for frame in entry.get("frames", ()) if not is_library(str(frame["filename"]))]
    shapes = ["x".join(str(int(length)) for length in sizes) for sizes in entry["input_sizes"]]
    caller = f"{Path(frames[0]['filename']).name}:{int(frames[0]['line'])}" if frames else ""
    return Call(
        number=int(entry["collective_seq_id"]),
        waits=not entry["retired"] and entry["state"] != "completed",
        size=0,
        kind=harmless(kind),
        name=" ".join(shapes) if kind in OF_ONE_SHAPE else "",
        caller=harmless(caller),
        group=group,
    )
