import json
from dataclasses import replace

import pytest

from launch.errors import TopologyError
from launch.machine.pcie import nvme_disks, with_pcie
from launch.machine.saved import read_topology
from launch.machine.show.picture import shapes_of
from launch.machine.show.table import table
from launch.machine.topology import Gpu, Link, Topology, from_json, restrict, to_json
from tests.unit.machine.sysfs import H800, gpus_of, write_disk, write_sysfs


def read(folder, machine):
    """The topology of a machine, its GPUs as a driver tells of them."""
    places = [(address, int(address[5] not in "01234567")) for address in gpus_of(machine)]
    gpus = tuple(Gpu(index=i, pci=address, numa=(node,)) for i, (address, node) in enumerate(places))
    rows = tuple(tuple(Link(kind="X" if a == b else "SYS") for b in gpus) for a in gpus)
    return with_pcie(Topology(source="NVML", gpus=gpus, links=rows), write_sysfs(folder, machine))


def kinds(topology):
    return {disk.pci: [link.kind for link in disk.links] for disk in topology.disks}


def tree(topology):
    return [(node.depth, node.address, node.device) for node in topology.pcie]


def test_each_gpu_of_a_server_has_a_disk_behind_its_switch(tmp_path):
    topology = read(tmp_path, H800)
    assert kinds(topology)["0000:42:00.0"] == ["NODE", "PIX", *["NODE"] * 2, *["SYS"] * 4]
    assert kinds(topology)["0000:9c:00.0"] == [*["SYS"] * 4, "PIX", *["NODE"] * 3]
    assert kinds(topology)["0000:28:00.0"] == ["NODE"] * 4 + ["SYS"] * 4  # at a root port
    assert [disk.name for disk in topology.disks] == [f"nvme{i}n1" for i in range(9)]
    switch = [(0, "pci0000:15", None), (1, "0000:16:00.0", None)]
    behind = [(2, "0000:18:00.0", "GPU0"), (2, "0000:19:00.0", "mlx5_0"), (2, "0000:1a:00.0", "nvme0n1")]
    assert tree(topology)[:7] == [*switch, *behind, (0, "pci0000:26", None), (1, "0000:28:00.0", "nvme1n1")]


def test_a_link_is_told_as_generation_and_lanes_and_an_idle_gpu_by_what_it_can(tmp_path):
    links = {node.device: (node.generation, node.lanes) for node in read(tmp_path, H800).pcie}
    assert (links["GPU0"], links["mlx5_0"], links["nvme0n1"], links[None]) == ((5, 16), (4, 16), (4, 4), (None, None))


def test_a_disk_with_several_ways_or_names_is_known_by_its_own(tmp_path):
    sysfs = write_sysfs(tmp_path, {})
    devices = [tmp_path / f"devices/pci0000:{root}/0000:{root}:01.0/0000:{root[0]}1:00.0" for root in ("00", "80")]
    write_disk(sysfs, devices[0], 0, "nvme0c0n1", "nvme0n2")  # the first of a disk with two controllers
    write_disk(sysfs, devices[1], 10, "nvme10n1")
    write_disk(sysfs, tmp_path / "devices/virtual/nvme-fabrics/ctl", 2, "nvme2n1")  # over a network
    assert nvme_disks(sysfs) == [("nvme0n1", devices[0]), ("nvme0n2", devices[0]), ("nvme10n1", devices[1])]


def test_disks_behind_a_root_complex_of_their_own_are_below_it(tmp_path):
    device = tmp_path / "devices/pci0000:64/0000:64:00.5/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    write_disk(tmp_path, device, 0, "nvme0n1")
    topology = with_pcie(Topology(source="none"), tmp_path)
    assert tree(topology) == [(0, "pci0000:64", None), (1, "pci10000:e0", None), (2, device.name, "nvme0n1")]


def test_the_json_has_all_of_it_and_an_older_one_has_none(tmp_path):
    topology = read(tmp_path, H800)
    plain = to_json(topology)
    assert read_topology(json.dumps(plain), name="t") == topology
    assert from_json({name: value for name, value in plain.items() if name not in ("disks", "pcie")}) == replace(
        topology, disks=(), pcie=()
    )
    assert from_json(to_json(restrict(topology, ""))).disks[0].links == ()


def test_a_tree_that_skips_a_depth_is_refused(tmp_path):
    plain = to_json(read(tmp_path, H800))
    plain["pcie"][1]["depth"] = 2
    with pytest.raises(TopologyError, match=r"pcie\[1\]\.depth: expected one from 0 to 1"):
        from_json(plain)


def test_table_and_picture_show_disks_and_the_tree(tmp_path):
    topology = read(tmp_path, H800)
    lines = table(topology).splitlines()
    assert "nvme1n1  0000:28:00.0  0     NODE  NODE  NODE  NODE  SYS   SYS   SYS   SYS" in lines
    assert "  PIX   PCIe, at most one switch between" in lines  # of a disk alone
    assert "  0000:16:00.0    switch        0     -" in lines
    assert "    0000:1a:00.0  nvme0n1       0     PCIe 4 x4" in lines
    texts = [shape.text for shape in shapes_of(topology)[0] if hasattr(shape, "text")]
    assert {"nvme0n1 PIX", "nvme1n1 NODE"} <= set(texts)
