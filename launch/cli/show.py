"""The commands topo, gpus and hostfile: print the hardware of a machine or a host list, without starting anything."""

import argparse
import json
import os
from typing import Any

from launch.cli.files import listed_hosts, read, write
from launch.errors import LaunchError
from launch.hosts.hostfile import write as spelled
from launch.machine import local, saved
from launch.machine.nvidia import VISIBLE
from launch.machine.nvidia_smi import SOURCE
from launch.machine.show import table
from launch.machine.topology import PeerAccess, Topology, exclude_busy_gpus, named, position, restrict, to_json
from launch.output import say
from launch.placement import measured
from launch.placement.remarks import unseen_by_nvidia_smi, without_speeds
from launch.placement.selection import Choice, select


def topo(options: argparse.Namespace) -> int:
    """Show how GPUs, NUMA nodes and NICs are connected."""
    if options.topology is not None and not (options.json or options.picture or options.pair):
        text, name = read(options.topology)
        shown = saved.read_text(text, name=name, gpu_name=options.gpu_name)
        print(table.peer_table(shown) if isinstance(shown, PeerAccess) else table.table(_remarked(shown)))
        return 0
    if options.pair is not None and options.json:
        raise LaunchError("--pair prints text: leave out --json")
    topology = _topology(options)
    if options.picture is not None:
        from launch.machine.show.picture import draw

        draw(topology, options.picture)
    if options.pair is not None:
        if len(options.pair) != 2:
            raise LaunchError("--pair takes two GPUs, as in 0,1")
        print(table.describe_pair(topology, *options.pair))
    elif options.json:
        print(json.dumps(to_json(topology), indent=1))
    elif options.picture is None:
        print(table.table(topology))
    return 0


def gpus(options: argparse.Namespace) -> int:
    """Select the best K GPUs, and explain the selection."""
    topology = _topology(options)
    if options.topology is None:
        topology = restrict(topology, os.environ.get(VISIBLE))
        if topology.source == SOURCE:
            say(unseen_by_nvidia_smi(["this host"]))
    if not topology.gpus:
        raise LaunchError("no GPU found on this host: pass a saved topology with --topology FILE")
    if options.measured is not None:
        text, name = read(options.measured)
        topology = measured.with_measured(topology, measured.read(text, name=name, needs_links=True).links)
    if options.gpus != "all":
        for index in options.gpus:
            position(topology, index)  # raises an error for an unknown index
    topology = exclude_busy_gpus(named(topology, options.gpus), options.k)
    selection = select(topology, options.k)
    best = selection.best
    others = {"runner-up": selection.runner_up, "worst": selection.worst}
    if options.json:
        answer: dict[str, Any] = {
            "gpus": list(best.gpus),
            "ring": list(best.ring),
            "bandwidth_gbps": best.bandwidth_gbps,
            "reason": best.reason,
        }
        for name, choice in others.items():
            answer[name.replace("-", "_")] = None if choice is None else list(choice.gpus)
            answer[f"{name.replace('-', '_')}_bandwidth_gbps"] = None if choice is None else choice.bandwidth_gbps
        print(json.dumps(answer))
        return 0
    print(f"GPUs {','.join(map(str, best.gpus))}, ring {'-'.join(map(str, best.ring))}{_speed(best)}")
    print(f"why: {best.reason}")
    for gpu in topology.gpus:
        if gpu.shared and gpu.index in best.gpus:
            print(f"GPU {gpu.index}: {gpu.shared}, chosen because --gpus names it")
    for name, choice in others.items():
        if choice is not None:
            print(f"{name}: {','.join(map(str, choice.gpus))}{_speed(choice)}")
    return 0


def hostfile(options: argparse.Namespace) -> int:
    """Convert a host list to another notation."""
    hosts = listed_hosts(options)
    assert hosts is not None  # the parser requires one of its sources
    text = spelled(hosts, options.format)
    if options.output is None:
        print(text, end="")
    else:
        write(options.output, text)
    return 0


def _topology(options: argparse.Namespace) -> Topology:
    if options.topology is not None:
        text, name = read(options.topology)
        return _remarked(saved.read_topology(text, name=name, gpu_name=options.gpu_name))
    if options.gpu_name is not None:
        raise LaunchError("--gpu-name is for a saved text: pass --topology FILE, or leave it out")
    return _remarked(local.local_topology(gpus=True))


def _remarked(topology: Topology) -> Topology:
    """Note models without known speeds on standard error."""
    for line in without_speeds({"this host": topology}):
        say(line)
    return topology


def _speed(choice: Choice) -> str:
    return "" if choice.bandwidth_gbps is None else f", {choice.bandwidth_gbps:g} GB/s"
