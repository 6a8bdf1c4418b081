from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cores import core_list
from launch.errors import TopologyError
from launch.machine.saved import read_text, read_topology
from launch.machine.show.table import link_word
from launch.machine.topology import Link, PeerAccess, Topology, from_json, through_switch, to_json
from tests.unit.machines import NO_GPU

RECORDED = Path(__file__).parents[4] / "shared" / "topo"
CX = [f"mlx5_{i}" for i in range(12)]

# file: GPUs, what some pairs say, NUMA nodes and cores of the first and the last GPU, NICs, and links of some of those
FACTS = {
    "azure_nc96_cgroup_collapsed_affinity_space": (4, "0-1 NV12, 1-2 SYS", ("0-3", "0-3"), ("0", "0"), [], ""),
    "dgx_h100_12nic_tab": (
        *(8, "0-7 NV18", ("0", "1"), ("0-55,112-167", "56-111,168-223"), CX),
        "mlx5_0-0 PXB, mlx5_3-1 PXB, mlx5_1-0 NODE, mlx5_11-7 PXB, mlx5_11-0 SYS",
    ),
    "gb10_single_4nic_tab": (1, "", ("0", "0"), ("0-19", "0-19"), ["NIC0", "NIC1", "NIC2", "NIC3"], "NIC3-0 NODE"),
    "h100x8_compact_space": (8, "0-7 NV18", ("0", "1"), ("0-51", "52-103"), [], ""),
    "h100x8_mp_truncated_affinity_tab": (
        *(8, "0-1 NODE, 0-7 SYS", ("0", "1"), ("0,2,4,6,8,10", "1,3,5,7,9,11"), CX),
        "mlx5_0-0 PIX, mlx5_2-0 PIX, mlx5_3-1 PIX, mlx5_0-1 NODE",
    ),
    "k80x2_soc_legend_space": (4, "0-1 PIX, 1-2 PHB", ("", ""), ("0-11", "0-11"), ["mlx4_0"], "mlx4_0-3 PHB"),
    "v100x8_vm_phb_numarange_tab": (8, "0-3 NV2, 0-5 PHB", ("0-1", "0-1"), ("0-63", "0-63"), [], ""),
}
SWITCHED = {"dgx_h100_12nic_tab", "h100x8_compact_space"}


def recorded(name):
    file = RECORDED / f"{name}.txt"
    if not file.exists():
        pytest.skip(f"{file} is not here: recorded outputs are not part of the project")
    return file.read_text()


def pairs_and_links(text):
    return [pair.rsplit(" ", 1) for pair in text.split(", ") if pair]


@pytest.mark.parametrize("name", FACTS)
def test_reads_what_real_machines_have_printed(name):
    count, pairs, numa, cores, nics, nic_links = FACTS[name]
    topology = read_topology(recorded(name), name=f"{name}.txt")
    assert topology.source == f"{name}.txt"
    assert [gpu.index for gpu in topology.gpus] == list(range(count))
    for pair, expected in pairs_and_links(pairs):
        a, b = map(int, pair.split("-"))
        assert link_word(topology.links[a][b]) == link_word(topology.links[b][a]) == expected, pair
    ends = topology.gpus[0], topology.gpus[-1]
    assert tuple(core_list(gpu.numa) for gpu in ends) == numa
    assert tuple(core_list(gpu.cores) for gpu in ends) == cores
    assert [nic.name for nic in topology.nics] == nics
    links = {nic.name: nic.links for nic in topology.nics}
    for pair, expected in pairs_and_links(nic_links):
        nic, gpu = pair.split("-")
        assert links[nic][int(gpu)] == Link(kind=expected), pair
    assert through_switch(topology) is (name in SWITCHED)
    assert from_json(to_json(topology)) == topology


def test_gpus_of_other_makers_are_refused():
    with pytest.raises(TopologyError, match=r"^t:[0-9]+: .*the header of `nvidia-smi topo -m`"):
        read_topology(recorded("rocm_mi308x8_showtopo"), name="t")


def test_a_recorded_file_about_copying_is_known_as_one():
    access = read_text(recorded("p2p_r_2xL4_cns"), name="t")
    assert access == PeerAccess(source="t", gpus=(0, 1), words=(("X", "CNS"), ("CNS", "X")))


def test_does_not_take_who_may_copy_for_how_they_are_connected():
    text = "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"
    with pytest.raises(TopologyError, match=r"p\.txt: .*topo -p2p.*save the output of `nvidia-smi topo -m`"):
        read_topology(text, name="p.txt")


def test_a_name_gives_the_links_their_speed():
    text = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n"
    assert read_topology(text, name="t").links[0][1] == Link(kind="NV", count=12)
    assert read_topology(text, name="t", gpu_name="A100").links[0][1].gbps == 240.0
    assert read_topology(text, name="t", gpu_name="banana").links[0][1].gbps is None
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


def test_reads_its_own_json_behind_blanks():
    assert read_text(f"\ufeff\n{NO_GPU}\n", name="t") == Topology(source="none")


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
