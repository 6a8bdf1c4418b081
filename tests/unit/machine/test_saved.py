from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cores import core_list
from launch.errors import TopologyError
from launch.machine.saved import read_text, read_topology
from launch.machine.show.table import link_word
from launch.machine.topology import PeerAccess, Topology, from_json, through_switch, to_json

RECORDED = Path(__file__).parents[4] / "shared" / "topo"

# file: GPUs, how the first and the last are connected, NUMA nodes and cores of the last, and NICs
FACTS = {
    "azure_nc96_cgroup_collapsed_affinity_space": (4, "SYS", "0-3", "0", 0),
    "dgx_h100_12nic_tab": (8, "NV18", "1", "56-111,168-223", 12),
    "gb10_single_4nic_tab": (1, "X", "0", "0-19", 4),
    "h100x8_compact_space": (8, "NV18", "1", "52-103", 0),
    "h100x8_mp_truncated_affinity_tab": (8, "SYS", "1", "", 12),
    "k80x2_soc_legend_space": (4, "PHB", "", "0-11", 1),
    "v100x8_vm_phb_numarange_tab": (8, "PHB", "0-1", "0-63", 0),
}


@pytest.mark.parametrize("name", FACTS)
def test_reads_what_real_machines_have_printed(name):
    file = RECORDED / f"{name}.txt"
    if not file.exists():
        pytest.skip(f"{file} is not here: recorded outputs are not part of the project")
    topology = read_topology(file.read_text(), name="t")
    last, word = topology.gpus[-1], link_word(topology.links[0][-1])
    found = (len(topology.gpus), word, core_list(last.numa), core_list(last.cores), len(topology.nics))
    assert found == FACTS[name]
    assert through_switch(topology) is (word == "NV18")
    assert from_json(to_json(topology)) == topology


def test_does_not_take_who_may_copy_for_how_they_are_connected():
    text = "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"
    with pytest.raises(TopologyError, match=r"p\.txt: .*topo -p2p.*save the output of `nvidia-smi topo -m`"):
        read_topology(text, name="p.txt")


def test_a_name_is_for_a_text():
    with pytest.raises(TopologyError, match="leave it out"):
        read_topology("{}", name="t", gpu_name="A100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t: empty"),
        ('{"a":\n 1,}', "t:2: not JSON"),
        ('{"a": NaN}', "t: not JSON: NaN"),
        ('{"a": ' + "[" * 100_000, "t: not JSON"),
        ("{}", "t: expected an object with source"),
        ("x" * 4_000_001, "t: 4000001 characters"),
    ],
)
def test_refuses_what_no_tool_has_printed(text, message):
    with pytest.raises(TopologyError, match=message):
        read_text(text, name="t")


WORDS = (
    *("GPU0", "GPU1", "X", "NV1", "NV0", "SYS", "OK", "mlx5_0", "NIC0", "0", "0-3", "N/A", "=", "", "{", "}"),
    *("CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "Legend:", "NIC Legend:", "NIC0: mlx5_0", "SYS = far"),
    *("=== Link Type between two GPUs ===", "\x1b[4m", "\u00b2", "\x1c", "\ufeff"),
)


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=5).map("\t".join) | st.text(max_size=20), max_size=8))
def test_garbage_is_refused_and_never_a_crash(lines):
    try:
        found = read_text("\n".join(lines), name="t")
    except TopologyError as error:
        message = str(error)
        assert message.startswith("t:")
        assert "\n" not in message
    else:
        assert isinstance(found, Topology | PeerAccess)
