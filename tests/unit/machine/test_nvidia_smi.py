import re

import pytest

from launch.errors import TopologyError
from launch.machine.nvidia_smi import from_nvidia_smi, parse
from launch.machine.topology import Gpu, Link, Nic, PeerAccess, Topology, check

# The header as nvidia-smi prints it to a terminal, underlined; a doubled tab before the last column.
TEXT = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tPIX\tSYS\t0-3,8\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tPXB\t4-7\t1-2\t\t3
NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_3
  NIC1: mlx5_bond_0
"""
SELF, PIX, SYS = (Link(kind=kind) for kind in ("X", "PIX", "SYS"))
EXPECTED = Topology(
    source="t",
    gpus=(Gpu(index=0, cores=(0, 1, 2, 3, 8), numa=(0,)), Gpu(index=1, cores=(4, 5, 6, 7), numa=(1, 2))),
    links=((SELF, Link(kind="NV", count=4)), (Link(kind="NV", count=4), SELF)),
    nics=(Nic(name="mlx5_3", links=(PIX, SYS)), Nic(name="mlx5_bond_0", links=(SYS, Link(kind="PXB")))),
)


def header(*rows, extras=""):
    """A table of GPUs alone; each row is its words."""
    labels = [f"GPU{i}" for i in range(len(rows))]
    lines = [f"{label}\t{row}" for label, row in zip(labels, rows, strict=True)]
    return "\n".join(["\t".join(["", *labels]) + extras, *lines])


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT.expandtabs(8),
        TEXT.replace("\x1b", ""),  # what is left of the escapes on a web page
        "\ufeff\n\n" + TEXT.replace("\n", "\r\n") + "\n\n",
        re.sub(r"(?m)^NIC[01]\t.*\n", "", TEXT),  # cut: without the NICs' rows
        f"root@n2:~# nvidia-smi topo -m\n{TEXT}root@n2:~#",  # as people paste it
        f"bash-5.1# nvidia-smi topo -m\n{TEXT}bash-5.1#",
        f"```\n$ nvidia-smi topo -m\n{TEXT}```",
        TEXT.replace("of # NVLinks", "of #\nNVLinks"),  # as a narrow terminal wraps it
        TEXT + "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n",
        TEXT.replace("NIC0\tNIC1\tCPU", "NIC0NIC1\tCPU").replace("GPU0\tGPU1\tNIC0N", "GPU0GPU1NIC0N"),
    ],
)
def test_reads_the_table_as_it_comes(text):
    assert parse(text, name="t") == EXPECTED


def test_a_list_of_cores_that_is_cut_off_is_not_all_of_them():
    table = header("X\tSYS\t0,2,4,6,8,10\t0", "SYS\tX\t1,3\t1", extras="\tCPU Affinity\tNUMA Affinity")
    assert [(gpu.cores, gpu.numa) for gpu in parse(table, name="t").gpus] == [((), (0,)), ((1, 3), (1,))]


def test_the_old_word_for_the_way_between_sockets():
    assert parse(header("X\tSOC", "SOC\tX"), name="t").links[0][1] == Link(kind="SYS")


@pytest.mark.parametrize(
    ("extras", "cells", "cores", "numa"),
    [
        ("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "\t0-3\t1\t\tN/A", (0, 1, 2, 3), (1,)),
        ("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "", (), ()),
        ("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "\t0-3\t\t\t4", (0, 1, 2, 3), ()),  # its memory is node 4
        ("     CPU Affinity  NUMA Affinity  GPU NUMA ID", "     0-3                           4", (0, 1, 2, 3), ()),
        ("\tCPU Affinity\tNUMA Affinity", "\tN/A\t0", (), (0,)),
        ("\tCPU Affinity\tNUMA Affinity", "\t\t\t0-3\t1", (0, 1, 2, 3), (1,)),  # out of line, but all there
        ("", "", (), ()),
        # As in a container that may use no core near its GPU: the cell of its cores is empty, and the rest moves.
        ("\tCPU Affinity\tNUMA Affinity", "\t\t0", (), (0,)),
        ("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "\t\t0\t\tN/A", (), (0,)),
        ("  CPU Affinity  NUMA Affinity", "                 0", (), (0,)),
        ("    CPU Affinity    NUMA Affinity    GPU NUMA ID", "        1        N/A", (), (1,)),
    ],
)
def test_affinities_may_be_missing(extras, cells, cores, numa):
    gpu = parse(f"\tGPU0{extras}\nGPU0\t X {cells}", name="t").gpus[0]
    assert (gpu.cores, gpu.numa) == (cores, numa)


def test_names_of_nics_without_a_space_between_are_read_from_the_rows():
    text = """GPU0GPU1mlx5_0mlx5_bond_0CPU Affinity
GPU0\t X \tNV2\tPIX\tSYS\t0-3
GPU1\tNV2\t X \tSYS\tPIX\t4-7
mlx5_0\tPIX\tSYS\t X \tSYS
mlx5_bond_0\tSYS\tPIX\tSYS\t X
"""
    topology = parse(text, name="t")
    assert topology.nics == (Nic(name="mlx5_0", links=(PIX, SYS)), Nic(name="mlx5_bond_0", links=(SYS, PIX)))
    assert [gpu.cores for gpu in topology.gpus] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert parse("GPU0GPU1\n GPU0\tX\tOK\n GPU1\tOK\tX", name="t").words == (("X", "OK"), ("OK", "X"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NV4\tPIX", "NV0\tPIX", "t:2: GPU0-GPU1 says 'NV0'; expected X, NV1"),
        ("NV4\tPIX", "NV4\tNV1", "t:2: GPU0-NIC0 says 'NV1'"),
        ("GPU0\t X ", "GPU0\tSYS", "t:2: GPU0-GPU0 says 'SYS'"),
        ("NV4\tPIX", "NV2\tPIX", "t:3: GPU1-GPU0 says NV4, GPU0-GPU1 says NV2; expected the same both ways"),
        ("GPU1\tNV4\t X \tSYS\tPXB\t4-7\t1-2\t\t3\n", "", "t:4: the table ends without a row of GPU1"),
        ("NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n", "", "t:4: the table ends without a row of NIC1"),
        ("GPU1\tNV4", "GPU0\tNV4", "t:3: found 'GPU0'; expected one row for each of the header's devices"),
        ("NUMA Affinity", "CPU Affinity", "t:1: CPU Affinity appears twice"),
        ("GPU0\tGPU1", "GPU0\tGPUx", "t:1: column 'GPUx'; expected GPU<n>"),
        ("4-7\t1-2\t\t3", "4-7\t1-2\t\t3\t9", "t:3: GPU1 has 8 cells; expected 4, one for each GPU and NIC"),
        ("SYS\t X \t\t\t\t\n\n", "SYS\t X \t0\n\n", "t:5: NIC1 has 5 cells; expected 4"),
        ("0-3,8", "3-0", "t:2: CPU Affinity of GPU0: '3-0' is not a list of numbers"),
        ("  NIC1: mlx5_bond_0\n", "", "t: NIC1 is in the header or in the NIC legend alone"),
        ("NIC1: mlx5_bond_0", "NIC1: mlx5_3", "t:15: 'NIC1: mlx5_3' is there already"),
        ("NIC1: mlx5_bond_0", "root@host:~#", "t: NIC1 is in the header or in the NIC legend alone"),
        ("\nLegend:", "\nSegmentation fault\nLegend:", "t:7: found 'Segmentation'"),
    ],
)
def test_refuses_what_it_does_not_understand(old, new, message):
    assert old in TEXT
    with pytest.raises(TopologyError, match=re.escape(message)) as caught:
        parse(TEXT.replace(old, new, 1), name="t")
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("text", ["No devices were found", "\tmlx5_0\nmlx5_0\tX", "CPU Affinity"])
def test_refuses_what_has_no_header(text):
    with pytest.raises(TopologyError, match=r"t:1: found .*; expected the header of `nvidia-smi topo -m`"):
        parse(text, name="t")


def test_says_who_may_copy_straight_to_whom():
    legend = "\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    text = f"        GPU1    GPU0\n GPU0   OK      X\n GPU1   X       TNS{legend}"
    assert parse(text, name="t") == PeerAccess(source="t", gpus=(0, 1), words=(("X", "OK"), ("TNS", "X")))
    assert parse(f"\tGPU0\n GPU0\tX{legend}", name="t") == PeerAccess(source="t", gpus=(0,), words=(("X",),))


@pytest.mark.parametrize("word", ["NV1", "X"])
def test_refuses_other_words_about_copying(word):
    with pytest.raises(TopologyError, match=f"t:2: GPU0-GPU2 says '{word}'; expected OK, CNS"):
        parse(header(f"X\tOK\t{word}", "OK\tX\tOK", "OK\tOK\tX"), name="t")


MATRIX = header("X\tNV12\t0-3\t0", "NV12\tX\t4-7\t1", extras="\tCPU Affinity\tNUMA Affinity")
QUERY = """\
0, GPU-aa, NVIDIA A100-SXM4-40GB, 00000000:07:00.0, Disabled
1, GPU-bb, NVIDIA A100-SXM4-40GB, 00010000:3B:00.0, Enabled
"""


def test_joins_what_three_questions_answer():
    topology = from_nvidia_smi(MATRIX, QUERY, "GPU-aa, 88\nGPU-aa, 9\n")
    first, second = topology.gpus
    assert (first.uuid, first.name, first.pci) == ("GPU-aa", "NVIDIA A100-SXM4-40GB", "0000:07:00.0")
    assert first.unusable == "busy: pid 9, 88"
    assert (second.pci, second.unusable) == ("10000:3b:00.0", "in MIG mode")
    assert topology.links[0][1] == topology.links[1][0] == Link(kind="NV", count=12, gbps=240.0)


def test_an_ill_gpu_is_not_usable_and_what_is_not_known_stays_so():
    query = "0, [N/A], [Unknown Error], [N/A], [N/A]\n1, GPU-bb, N/A, 00000000:3B:00.0, [Not Supported]\n\n"
    first, second = from_nvidia_smi(MATRIX, query, "").gpus
    assert (first.uuid, first.name, first.pci, first.unusable) == (None, None, None, "unhealthy: Unknown Error")
    assert (second.uuid, second.name, second.unusable) == ("GPU-bb", None, None)


HANDLE = "Unable to determine the device handle for"
ERROR = "Unknown Error"
FIRST = QUERY.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("matrix", "lost", "index", "fault"),
    [
        (MATRIX, "1, GPU-bb, [GPU is lost], [GPU is lost], [GPU is lost]\n", 1, "GPU is lost"),
        (MATRIX, f"{HANDLE} GPU0001:3B:00.0: GPU is lost.  Reboot the system\n", 1, "GPU is lost.  Reboot the system"),
        (f"{HANDLE} gpu 0000:3b:00.0: {ERROR}\n{MATRIX}", f"{HANDLE} gpu 0000:3b:00.0: {ERROR}\n", 1, ERROR),
        (header("X"), f"{HANDLE} GPU1: 0000:C1:00.0: {ERROR}\n", 1, ERROR),
        (header("X"), f"{HANDLE} GPU7: 0000:C1:00.0: {ERROR}\n", 7, ERROR),
        (None, f"{HANDLE} GPU 0000:3B:00.0: {ERROR}\n", 1, ERROR),
        (None, f"4, [N/A], [{ERROR}], [N/A], [N/A]\n", 4, ERROR),
    ],
)
def test_a_lost_gpu_is_named_and_leaves_the_others_usable(matrix, lost, index, fault):
    topology = from_nvidia_smi(matrix, FIRST + lost, f"{HANDLE} GPU0001:3B:00.0: GPU is lost.\n")
    check(topology, "t")
    assert {gpu.index: gpu.unusable for gpu in topology.gpus} == {0: None, index: f"unhealthy: {fault}"}
    assert topology.gpus[0].uuid == "GPU-aa"


def test_a_lost_gpu_is_far_from_adapters():
    matrix = "\tGPU0\tGPU2\tmlx5_0\nGPU0\tX\tNV4\tPIX\nGPU2\tNV4\tX\tPHB\nmlx5_0\tPIX\tPHB\tX\n"
    query = FIRST + FIRST.replace("0, GPU-aa", "2, GPU-cc") + f"{HANDLE} GPU 0000:3B:00.0: GPU is lost\n"
    topology = from_nvidia_smi(matrix, query, "")
    check(topology, "t")
    assert [gpu.index for gpu in topology.gpus if gpu.unusable] == [1]
    assert topology.links[0][2].kind == "NV"
    assert [link.kind for link in topology.nics[0].links] == ["PIX", "SYS", "PHB"]


@pytest.mark.parametrize(
    ("query", "apps", "message"),
    [
        ("Unable to determine the device handle\n", "", "nvidia-smi --query-gpu:1: found 'Unable"),
        (QUERY + QUERY, "", "nvidia-smi --query-gpu:3: found '0, GPU-aa"),
        (QUERY.splitlines()[0], "", "lists GPUs [0], but topo -m lists [0, 1]"),
        (QUERY.replace("00000000:07:00.0", "7"), "", "PCI address '7'"),
        (QUERY, "GPU-aa\n", "nvidia-smi --query-compute-apps:1: found 'GPU-aa'"),
    ],
)
def test_refuses_answers_that_do_not_fit(query, apps, message):
    with pytest.raises(TopologyError, match=re.escape(message)):
        from_nvidia_smi(MATRIX, query, apps)


@pytest.mark.parametrize("apps", ["[Not Supported]\n", "WARNING: infoROM is corrupted\nGPU-aa, [N/A]\n"])
def test_what_nvidia_smi_does_not_tell_of_processes_is_no_fault(apps):
    gpus = from_nvidia_smi(MATRIX, f"{QUERY}WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n", apps).gpus
    assert gpus[0].unusable == ("busy: pid unknown" if "GPU-aa" in apps else None)


def test_refuses_the_wrong_table():
    with pytest.raises(TopologyError, match="expected the table of topo -m"):
        from_nvidia_smi(header("X\tOK", "OK\tX"))
