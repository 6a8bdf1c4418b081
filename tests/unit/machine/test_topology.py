import dataclasses
import json
import re

import pytest

from launch.cores import core_list, parse_cores, parse_numbers, parse_range
from launch.errors import TopologyError
from launch.machine.show.table import describe_pair, peer_table, table
from launch.machine.topology import (
    Gpu,
    Interface,
    Link,
    Nic,
    NumaNode,
    PeerAccess,
    Port,
    Topology,
    from_json,
    position,
    through_switch,
    to_json,
)
from tests.unit.machines import linked, refusal_of

SELF, NV2, SYS = Link(kind="X"), Link(kind="NV", count=2, gbps=40.0), Link(kind="SYS", gbps=10.0)
PORTS = (Port(number=1, active=True, ethernet=False), Port(number=2, active=False, ethernet=True))
SLOW = "8 of 16 PCIe lanes"


def machine(**changes):
    """GPU 0 and 2 with two NVLinks, GPU 5 behind the other socket and busy."""
    whole = Topology(
        source="a machine",
        gpus=(
            Gpu(index=0, cores=(0, 1), numa=(0,), uuid="GPU-a", name="Tesla V100-SXM2-16GB", pci="0000:06:00.0"),
            Gpu(index=2, cores=(0, 1), numa=(0,), name="Tesla V100-SXM2-16GB"),
            Gpu(index=5, numa=(1,), name="Tesla V100-SXM2-16GB", unusable="busy: pid 7", drawbacks=(SLOW,)),
        ),
        links=((SELF, NV2, SYS), (NV2, SELF, SYS), (SYS, SYS, SELF)),
        nics=(Nic(name="mlx5_0", links=(Link(kind="PIX"), Link(kind="NODE"), Link(kind="SYS")), ports=PORTS),),
        numa_nodes=(NumaNode(id=0, cores=(0, 1)), NumaNode(id=1, cores=())),
        interfaces=(Interface(name="eth0", cidr="10.0.0.3/24", speed_mbps=10_000),),
        cpu_quota=1.5,
    )
    return dataclasses.replace(whole, **changes)


def test_reads_a_list_of_cores():
    assert parse_cores("8,0-3,3-4\n") == (0, 1, 2, 3, 4, 8)
    assert parse_cores("65535") == (65535,)


@pytest.mark.parametrize("text", ["", "3-1", "0-", "-1", "0,,1", "0-65536", "0-3-5", "²"])
def test_refuses_what_is_no_list_of_cores(text):
    with pytest.raises(TopologyError, match="expected one such as 0-3,8"):
        parse_cores(text)


def test_numbers_stay_in_their_order_and_the_ends_of_a_range_as_they_are_written():
    assert parse_numbers("8,0-2,1") == [8, 0, 1, 2, 1]
    assert [parse_numbers(text) for text in ("1,", "3-1", "0-65535,0")] == [None] * 3
    assert (parse_range("08-11"), parse_range("7"), parse_range("11-08")) == (("08", "11"), ("7", "7"), None)


def test_writes_the_shortest_list_of_cores():
    assert core_list((8, 0, 1, 2, 3, 5)) == "0-3,5,8"
    assert core_list(()) == ""


def test_finds_a_gpu_by_its_index_not_its_place():
    assert position(machine(), 5) == 2
    line = refusal_of(TopologyError, lambda: position(machine(), 1))
    assert line.startswith("a machine: unknown GPU 1; its GPUs are 0,2,5")


@pytest.mark.parametrize(
    ("count", "gpus", "switch"),
    [(6, 16, True), (12, 3, True), (6, 4, False), (18, 2, False), (1, 1, False)],
)
def test_equal_links_in_excess_of_what_a_gpu_has_go_through_a_switch(count, gpus, switch):
    assert through_switch(linked(gpus, "NV", count=count)) is switch
    assert not through_switch(machine())  # unequal links


def test_json_gives_the_same_topology_back():
    whole = machine()
    assert from_json(json.loads(json.dumps(to_json(whole)))) == whole
    assert from_json(json.loads(json.dumps(to_json(whole)).replace("40.0", "40"))) == whole


def changed(path, value):
    plain = to_json(machine())
    at = plain
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return plain


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"source": "x"}, "h.json: expected an object with source, gpus"),
        (changed(["source"], 3), "h.json.source: expected str, found 3"),
        (changed(["gpus"], {}), r"h.json.gpus: expected a list"),
        (changed(["links", 0, 1, "kind"], "LAN"), r"links\[0\]\[1\].kind: expected NV"),
        (changed(["cpu_quota"], 0.0), "h.json.cpu_quota: expected a positive number or null, found 0.0"),
        (changed(["gpus", 0, "index"], -1), "expected each index once"),
        (changed(["links"], []), "expected 3 rows, one for each GPU, found 0"),
        (changed(["nics", 0, "links"], []), r"nics\[0\].links: expected 3 links"),
        (changed(["links", 0, 1, "count"], 1), r"links\[0\]\[1\]: expected .*the same link both ways"),
        (changed(["links", 0, 0, "kind"], "PIX"), "X for a GPU and itself alone"),
        (changed(["links", 0, 1, "count"], 0), "count: expected one that goes with NV, found 0"),
        (changed(["links", 0, 1, "gbps"], 10**400), "gbps: expected float or null"),
        (
            changed(["interfaces", 0, "cidr"], "10.0.0/33"),
            r"interfaces\[0\].cidr: expected one as 10.0.0.3/24, found '10",
        ),
        (changed(["numa_nodes", 0, "cores", 0], -1), r"numa_nodes\[0\]: expected numbers from 0 to 65535"),
        (changed(["nics", 0, "links", 0, "kind"], "X"), r"nics\[0\].links: expected no kind X"),
    ],
)
def test_refuses_json_that_is_no_topology(plain, message):
    assert re.search(message, refusal_of(TopologyError, lambda: from_json(plain, name="h.json")))


def test_says_in_words_how_two_are_connected():
    assert "GPU 2 is named twice" in refusal_of(TopologyError, lambda: describe_pair(machine(), 2, 2))
    line = "GPU 0 and GPU 2 are connected by 2 NVLinks: 40 GB/s one way. Both are at NUMA node 0."
    assert describe_pair(machine(), 0, 2) == line
    assert describe_pair(machine(), 5, 0) == (
        "GPU 5 and GPU 0 are connected by SYS (PCIe, and on through the link between NUMA nodes or CPU sockets): "
        "10 GB/s one way. GPU 5 is at NUMA node 1, GPU 0 at 0. GPU 5 cannot be used: busy: pid 7."
    )


def two(link, **facts):
    gpus = (Gpu(index=0, **facts), Gpu(index=1, **facts))
    return Topology(source="text", gpus=gpus, links=((SELF, link), (link, SELF)))


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (linked(8, "NV", count=18), "18 NVLinks through NVSwitch: how fast is not known, the text does not name"),
        (two(Link(kind="NV", count=1)), "1 NVLink: how fast is not known, the text does not name the GPU's model (--"),
        (two(dataclasses.replace(SYS, p2p=False)), "10 GB/s one way. The driver does not let them copy straight to"),
        (two(Link(kind="SYS"), name="A100"), "how fast is not known for this CPU or GPU"),
        (two(Link(kind="PIX"), name="G1"), "PIX (PCIe, at most one switch between): how fast is not known for G1"),
    ],
)
def test_says_why_a_speed_is_not_known_and_a_pair_slow(topology, words):
    assert words in describe_pair(topology, 0, 1)


def test_shows_all_of_a_topology_as_a_table():
    assert (
        table(machine())
        == """\
3 GPUs (a machine): Tesla V100-SXM2-16GB

      GPU0  GPU2  GPU5  mlx5_0
GPU0  X     NV2   SYS   PIX
GPU2  NV2   X     SYS   NODE
GPU5  SYS   SYS   X     SYS

  NV#   # NVLinks
  PIX   PCIe, at most one switch between
  NODE  PCIe, through host bridges of one NUMA node
  SYS   PCIe, and on through the link between NUMA nodes or CPU sockets

GB/s one way
      GPU0  GPU2  GPU5
GPU0  -     40    10
GPU2  40    -     10
GPU5  10    10    -

GPU  NUMA  cores    PCI           UUID   not usable   drawbacks           NICs near it
0    0     0-1      0000:06:00.0  GPU-a  -            -                   mlx5_0 (PIX)
2    0     0-1      -             -      -            -                   -
5    1     unknown  -             -      busy: pid 7  8 of 16 PCIe lanes  -

NUMA node  usable cores
0          0-1
1          none

interface  address      Mb/s
eth0       10.0.0.3/24  10000
"""
    )


def test_no_name_reaches_the_terminal_as_it_is():
    odd = "\x1b]0;owned\x07"
    gpus = tuple(Gpu(index=i, name=f"V100{odd}", uuid=odd, pci=odd, unusable=odd) for i in (0, 1))
    links = ((SELF, SYS), (SYS, SELF))
    nics = (Nic(name=odd, links=(SYS, SYS)),)
    lan = (Interface(name=odd, cidr="10.0.0.3/24"),)
    topology = Topology(source=odd, gpus=gpus, links=links, nics=nics, interfaces=lan)
    access = PeerAccess(source=odd, gpus=(0, 1), words=(("X", "OK"), ("OK", "X")))
    for text in (table(topology), describe_pair(topology, 0, 1), peer_table(access), table(Topology(source=odd))):
        assert r"\x1b]0;owned\x07" in text
        assert all(line.isprintable() for line in text.splitlines())
    assert table(Topology(source="none")) == "No GPU (none)\n"
