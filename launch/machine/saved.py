"""Saved output of any tool -> a topology."""

import json

from launch import documents
from launch.errors import TopologyError
from launch.machine import nvidia_smi
from launch.machine.topology import PeerAccess, Topology, from_json

MAX_CHARACTERS = 4_000_000  # the JSON of 16 GPUs has 30,000


def read_text(text: str, *, name: str, gpu_name: str | None = None) -> Topology | PeerAccess:
    """Parse the complete output of nvidia-smi or `hvdlaunch topo --json`.

    `name` is the file's, for messages and for `Topology.source`, `gpu_name` the NVIDIA model, which is not in
    nvidia-smi's tables: without it speeds are unknown. TopologyError, with file, line and the expected text, if the
    text is not understood, or if `gpu_name` cannot be used.
    """
    if len(text) > MAX_CHARACTERS:
        raise TopologyError(f"{name}: {len(text)} characters; expected what one of the tools prints about one host")
    start = text.lstrip("\ufeff \t\r\n")
    if not start.startswith("{"):
        return nvidia_smi.parse(text, name=name, gpu_name=gpu_name)
    if gpu_name is not None:
        raise TopologyError(f"{name}: a GPU name is for the tables of nvidia-smi alone; leave it out")
    try:
        value = documents.parse(start)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise TopologyError(f"{name}{line}: not JSON: {why}; write it with topo --json") from None
    return from_json(value, name=name)


def read_topology(text: str, *, name: str, gpu_name: str | None = None) -> Topology:
    """Parse the output of a tool that shows how the GPUs are connected; TopologyError as in `read_text`."""
    topology = read_text(text, name=name, gpu_name=gpu_name)
    if isinstance(topology, PeerAccess):
        raise TopologyError(
            f"{name}: this is from `nvidia-smi topo -p2p`: which GPUs may copy directly, not how they are connected; "
            "save the output of `nvidia-smi topo -m` instead"
        )
    return topology
