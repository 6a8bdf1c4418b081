"""Saved output of any tool -> a topology."""

import json
from typing import NoReturn

from launch.errors import TopologyError
from launch.machine import nvidia_smi
from launch.machine.topology import PeerAccess, Topology, from_json

MAX_CHARACTERS = 4_000_000  # the JSON of 16 GPUs has 30,000


def read_text(text: str, *, name: str, gpu_name: str | None = None) -> Topology | PeerAccess:
    """Parse the output of nvidia-smi or `hvdlaunch topo --json`.

    Args:
        text: the complete output.
        name: of the file, for messages and for `Topology.source`.
        gpu_name: the NVIDIA model, which is not in nvidia-smi's tables; without it speeds are unknown.

    Raises:
        TopologyError: the text is not understood, or `gpu_name` cannot be used; with file, line and the expected text.
    """
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"{name}: {len(text)} characters; expected what one of the tools prints about one host")
    start = text.lstrip("\ufeff \t\r\n")
    is_json = start.startswith("{")
    if gpu_name is not None and is_json:
        raise TopologyError(f"{name}: a GPU name is for the tables of nvidia-smi alone; leave it out")
    if is_json:
        return _from_json_text(start, name)
    return nvidia_smi.parse(text, name=name, gpu_name=gpu_name)


def read_topology(text: str, *, name: str, gpu_name: str | None = None) -> Topology:
    """Parse the output of a tool that shows how the GPUs are connected.

    Raises:
        TopologyError: as in `read_text`; also for the table of `nvidia-smi topo -p2p`, which does not show that.
    """
    topology = read_text(text, name=name, gpu_name=gpu_name)
    if isinstance(topology, PeerAccess):
        raise TopologyError(
            f"{name}: this is from `nvidia-smi topo -p2p`: which GPUs may copy directly, not how they are connected; "
            "save the output of `nvidia-smi topo -m` instead"
        )
    return topology


def _from_json_text(text: str, name: str) -> Topology:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number of JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise TopologyError(f"{name}:{error.lineno}: not JSON: {error.msg}; write it with topo --json") from None
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{name}: not JSON: {error}; write it with topo --json") from None
    return from_json(value, name=name)
