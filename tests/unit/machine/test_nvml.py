"""One machine, told twice: by a stand-in for the driver's library with a made-up sysfs, and by nvidia-smi's texts."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from launch.errors import TopologyError
from launch.machine.nvidia_smi import from_nvidia_smi
from launch.machine.nvml import from_nvml, read_nvml
from launch.machine.topology import Gpu, Link, Port
from tests.unit.machine.sysfs import write_adapter, write_device

# Eight V100 in a hybrid cube mesh; two switches on each socket, each with two GPUs and a NIC.
DEVICES = [*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(4))]
HEADER = "\t".join(["\t\x1b[4m" + DEVICES[0], *DEVICES[1:], "CPU Affinity", "NUMA Affinity"])
MATRIX = f"""\
{HEADER}\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tNODE\tSYS\tSYS\t0-3,68\t0\t\tN/A
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tNODE\tSYS\tSYS\t0-3,68\t0\t\tN/A
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tNODE\tPIX\tSYS\tSYS\t0-3,68\t0\t\tN/A
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tNODE\tPIX\tSYS\tSYS\t0-3,68\t0\t\tN/A
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tSYS\tPIX\tNODE\t4-7\t1\t\tN/A
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tSYS\tPIX\tNODE\t4-7\t1\t\tN/A
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNODE\tPIX\t4-7\t1\t\tN/A
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tNODE\tPIX\t4-7\t1\t\tN/A
NIC0\tPIX\tPIX\tNODE\tNODE\tSYS\tSYS\tSYS\tSYS\t X \tNODE\tSYS\tSYS\t\t\t\t
NIC1\tNODE\tNODE\tPIX\tPIX\tSYS\tSYS\tSYS\tSYS\tNODE\t X \tSYS\tSYS\t\t\t\t
NIC2\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tNODE\tNODE\tSYS\tSYS\t X \tNODE\t\t\t\t
NIC3\tSYS\tSYS\tSYS\tSYS\tNODE\tNODE\tPIX\tPIX\tSYS\tSYS\tNODE\t X \t\t\t\t

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_2
  NIC2: mlx5_4
  NIC3: mlx5_10
"""
BUSES = [0x06, 0x07, 0x0A, 0x0B, 0x85, 0x86, 0x89, 0x8A]
NAME = "Tesla V100-SXM2-16GB"
QUERY = "".join(f"{i}, GPU-{i}{i}, {NAME}, 00000000:{bus:02X}:00.0, [N/A]\n" for i, bus in enumerate(BUSES))
APPS = "GPU-33, 4242\n"
NVLINKS = ["01", "02", "03", "03", "04", "04", "12", "12", "13", "15", "15", "23", "23", "26", "37"]
NVLINKS += ["45", "46", "47", "47", "56", "56", "57", "67", "67"]


class NVMLError(Exception):
    def __init__(self, value, text="Not Supported"):
        super().__init__(text)
        self.value = value


def lacking(*_):
    raise NVMLError(3)


def nvml(**answers):
    """The part of pynvml that is asked, for the machine above; a GPU's handle is its index.

    Other answers are given by what follows nvmlDeviceGet.
    """
    remotes = [[] for _ in BUSES]
    for a, b in NVLINKS:
        remotes[int(a)].append(int(b))
        remotes[int(b)].append(int(a))

    def link_state(gpu, link):
        if link >= len(remotes[gpu]):
            raise NVMLError(2, "Invalid Argument")
        return 1

    def cores(gpu, words):
        mask = [0b1111, 0b10000] if gpu < 4 else [0b1111_0000]
        return [*mask, *[0] * (words - len(mask))]

    usual = {
        "Count": lambda: len(BUSES),
        "HandleByIndex": lambda index: index,
        "UUID": lambda gpu: f"GPU-{gpu}{gpu}",
        "Name": lambda _: NAME,
        "PciInfo": lambda gpu: SimpleNamespace(domain=0, bus=BUSES[gpu], device=0),
        "CpuAffinity": cores,
        "ComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=4242)] if gpu == 3 else [],
        "MaxPcieLinkGeneration": lambda _: 3,
        "TopologyCommonAncestor": lambda a, b: 50 if (a < 4) != (b < 4) else 10 if a // 2 == b // 2 else 40,
        "NvLinkState": link_state,
        "NvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(domain=0, bus=BUSES[remotes[gpu][link]], device=0),
        "NvLinkRemoteDeviceType": lacking,
        "MigMode": lacking,
        "TotalEccErrors": lacking,
        "RemappedRows": lacking,
    }
    functions = {f"nvmlDeviceGet{name}": answer for name, answer in {**usual, **answers}.items() if answer}
    return SimpleNamespace(NVMLError=NVMLError, NVML_NVLINK_MAX_LINKS=18, **functions)


@pytest.fixture
def sysfs(tmp_path):
    adapters = {"05": "mlx5_0", "09": "mlx5_2", "84": "mlx5_4", "88": "mlx5_10"}
    for first, (root, adapter) in zip(range(0, 8, 2), adapters.items(), strict=True):
        switch, numa = f"pci0000:{root}/0000:{root}:00.0/0000:{root}:01.0", int(root > "09")
        for port, bus in enumerate(BUSES[first : first + 2]):
            write_device(tmp_path, f"{switch}/0000:{root}:0{port}.1", f"0000:{bus:02x}:00.0", numa)
        device = write_device(tmp_path, f"{switch}/0000:{root}:0f.1", f"0000:{root}:1f.0", numa)
        write_adapter(tmp_path, adapter, device)
    return tmp_path


@pytest.mark.parametrize("sockets_gbps", [None, 10.0])
def test_the_library_and_the_tool_give_the_same_topology(sysfs, sockets_gbps):
    by_library = from_nvml(nvml(), sysfs=sysfs, sockets_gbps=sockets_gbps)
    by_tool = from_nvidia_smi(MATRIX, QUERY, APPS, sockets_gbps=sockets_gbps)
    assert by_library.source == "NVML"
    assert dataclasses.replace(by_library, source="nvidia-smi") == by_tool
    assert by_tool.links[0][3] == Link(kind="NV", count=2, gbps=40.0)
    assert by_tool.links[0][5] == Link(kind="SYS", gbps=sockets_gbps)
    assert [gpu.unusable for gpu in by_tool.gpus] == [None] * 3 + ["busy: pid 4242"] + [None] * 4
    assert by_tool.gpus[7].pci == "0000:8a:00.0"
    assert by_tool.gpus[0].cores == (0, 1, 2, 3, 68)


def switched(**answers):
    """GPUs whose links all end in NVSwitches; of GPU 2's twelve, two are broken."""
    usual = {
        "NvLinkState": lambda gpu, link: int(link < (10 if gpu == 2 else 12)),
        "NvLinkRemotePciInfo": lambda _, link: SimpleNamespace(domain=0, bus=0xC0 + link, device=0),
        "NvLinkRemoteDeviceType": lambda *_: 2,
    }
    return nvml(**{**usual, **answers})


def test_through_switches_the_gpu_with_fewer_links_counts(sysfs):
    links = from_nvml(switched(), sysfs=sysfs).links
    assert (links[0][7].count, links[0][2].count, links[2][0].count) == (12, 10, 10)


@pytest.mark.parametrize(
    ("library", "kinds"),
    [
        (switched(NvLinkRemoteDeviceType=lacking), ["PIX", "NODE", "SYS"]),  # to something unknown
        (nvml(NvLinkState=lacking, TopologyCommonAncestor=lacking), ["PIX", "NODE", "SYS"]),  # as the kernel knows
        (nvml(NvLinkState=lacking, TopologyCommonAncestor=lambda *_: 0), ["PIX", "PIX", "PIX"]),  # of one board
    ],
)
def test_gpus_without_nvlinks_are_connected_over_pcie(sysfs, library, kinds):
    links = from_nvml(library, sysfs=sysfs).links
    assert [links[0][other].kind for other in (1, 2, 7)] == kinds
    assert links[0][1].gbps == 12.0


def test_what_a_driver_does_not_say_is_not_known(sysfs):
    old = nvml(MigMode=None, RemappedRows=None)  # nor does its module know these
    for name in set(vars(old)) - {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}:
        if name.startswith("nvmlDeviceGet"):
            setattr(old, name, lacking)
    topology = from_nvml(old, sysfs=sysfs)
    assert topology.gpus == tuple(Gpu(index=i) for i in range(8))
    assert {link for i, row in enumerate(topology.links) for j, link in enumerate(row) if i != j} == {Link(kind="SYS")}


def test_says_which_gpus_cannot_be_had_and_why(sysfs):
    def handle(index):
        if index == 0:
            raise NVMLError(15, "GPU is lost")
        return index

    def errors(gpu, error, counter):
        assert (error, counter) == (1, 0)
        if gpu == 2:
            raise NVMLError(16, "GPU requires restart")
        return 5 if gpu == 4 else 0

    rows = {"MigMode": lambda gpu: [int(gpu == 1), 0], "RemappedRows": lambda gpu: (3, 1, 1, int(gpu == 5))}
    topology = from_nvml(nvml(HandleByIndex=handle, TotalEccErrors=errors, **rows), sysfs=sysfs)
    answers = ["does not answer (GPU is lost)", "does not answer (GPU requires restart)"]
    memory = ["5 uncorrected memory errors since its driver was loaded", "a row of its memory could not be remapped"]
    lost, restart, errors, row = [f"unhealthy: {fault}" for fault in (*answers, *memory)]
    found = [gpu.unusable for gpu in topology.gpus]
    assert found == [lost, "in MIG mode", restart, "busy: pid 4242", errors, row, None, None]
    assert topology.gpus[0].uuid is None
    assert topology.links[0][3] == topology.links[3][0] == Link(kind="SYS")


@pytest.mark.parametrize(
    ("name", "generation", "gbps"),
    [
        ("NVIDIA A100-PCIE-40GB", 3, 12.0),  # in a slot of an older generation
        ("NVIDIA A100-PCIE-40GB", None, 24.0),
        ("NVIDIA B200", 6, 48.0),  # of which no figure is known
        ("a new model", 4, 24.0),
    ],
)
def test_a_gpu_is_as_fast_as_its_slot(sysfs, name, generation, gbps):
    library = nvml(Name=lambda _: name, MaxPcieLinkGeneration=lambda _: generation)
    assert from_nvml(library, sysfs=sysfs, sockets_gbps=99.0).links[0][5] == Link(kind="SYS", gbps=gbps)


def test_memory_that_no_process_explains_is_in_use_by_one_that_is_hidden(sysfs):
    """By GPU: MiB in all, free and reserved; GPU 2 has a driver of before reserved memory was told apart."""
    in_mib = [(16384, 15000, 360), (16384, 15000, 359), (16384, 15104, 0), *[(16384, 9000, 0)] * 2, *[(1, 1, 0)] * 3]

    def memory(gpu, version=None):
        assert version in (None, 0x02000028)
        if version and gpu == 2:
            raise NVMLError(13, "Function Not Found")
        total, free, reserved = (mib << 20 for mib in in_mib[gpu])
        more = {"reserved": reserved} if version else {}
        return SimpleNamespace(total=total, free=free, used=total - free, **more)

    in_use = nvml(
        ComputeRunningProcesses=lambda _: [],
        MemoryInfo=memory,
        DisplayActive=lambda gpu: int(gpu == 3),
        NumaNodeId=lambda gpu: 8 if gpu == 4 else lacking(),  # its memory is used by the system
    )
    found = [gpu.unusable for gpu in from_nvml(in_use, sysfs=sysfs).gpus]
    hidden = "busy: {} MiB in use by a process that is not seen from here"
    assert found[:5] == [None, hidden.format(1025), hidden.format(1280), None, None]


def test_pairs_that_may_not_copy_straight_are_told(sysfs):
    """GPU 0 may read from GPU 1 but not write to it; of GPU 2 and 3 the driver does not know."""
    blocking = nvml(P2PStatus=lambda a, b, access: {(1, 0): 2 * access, (3, 2): 6, (7, 6): 1}.get((a, b), 0))
    links = from_nvml(blocking, sysfs=sysfs).links
    blocked = [(a, b) for a, row in enumerate(links) for b, link in enumerate(row) if not link.p2p]
    assert blocked == [(0, 1), (1, 0), (6, 7), (7, 6)]
    assert links[0][1] == Link(kind="NV", count=1, gbps=20.0, p2p=False)


def by_gpu(*facts):
    """An answer for the first GPUs; it is not known of the others."""
    return lambda gpu: facts[gpu] if gpu < len(facts) else lacking()


def test_says_what_may_slow_a_gpu(sysfs):
    slowed = nvml(
        CurrPcieLinkWidth=by_gpu(16, 8, 16, 16, 16),
        MaxPcieLinkWidth=by_gpu(16, 16, 16, 16, 16),
        CurrPcieLinkGeneration=by_gpu(4, 4, 1, 1, 1),
        MaxPcieLinkGeneration=by_gpu(4, 4, 4, 4, 3),
        GpuMaxPcieLinkGeneration=by_gpu(4, 4, 4, 4, 4),
        PerformanceState=by_gpu(0, 0, 8, 0, 8),  # GPU 2 is idle
        DisplayActive=by_gpu(0, 0, 0, 0, 1),
    )
    drawbacks = {gpu.index: gpu.drawbacks for gpu in from_nvml(slowed, sysfs=sysfs).gpus if gpu.drawbacks}
    of_the_last = ("PCIe generation 3 of 4", "drives a display")
    assert drawbacks == {1: ("8 of 16 PCIe lanes",), 3: ("PCIe generation 1 of 4",), 4: of_the_last}


def test_says_which_gpus_are_slowed_down_and_which_wait_for_a_reset(sysfs):
    throttled = nvml(
        CurrentClocksEventReasons=by_gpu(0x1, 0x20, 0x8 | 0x40, 0x8 | 0x80, 0x8, 0x4),
        CurrentClocksThrottleReasons=lambda gpu: 0x80 if gpu == 7 else lacking(),
        RemappedRows=lambda gpu: (0, 0, int(gpu == 6), 0),
        RetiredPagesPendingStatus=lambda gpu: int(gpu == 7),
    )
    heat, power = "slowed down by heat", "slowed down by its power supply"
    clocks = {1: (heat,), 2: (heat,), 3: (power,), 4: ("slowed down by its hardware",)}  # 0 is idle, 5 at its limit
    memory = {6: ("a row of its memory waits to be remapped",), 7: (power, "a page of its memory waits to be retired")}
    found = {gpu.index: gpu.drawbacks for gpu in from_nvml(throttled, sysfs=sysfs).gpus if gpu.drawbacks}
    assert found == clocks | memory


def test_knows_the_ports_of_the_adapters(sysfs):
    port = sysfs / "class/infiniband/mlx5_2/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "link_layer").write_text("InfiniBand\n")
    ports = {nic.name: nic.ports for nic in from_nvml(nvml(), sysfs=sysfs).nics}
    assert ports.pop("mlx5_2") == (Port(number=1, active=False, ethernet=False),)
    assert set(ports.values()) == {()}


def library(monkeypatch, *error):
    """A module whose start fails with this error, if any; the names of what is called of it."""
    called = []

    def start():
        called.append("start")
        if error:
            raise NVMLError(*error)

    module = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=start, nvmlShutdown=lambda: called.append("end"), nvmlDeviceGetCount=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return called


def test_a_machine_without_the_module_or_the_driver_is_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml() is None
    library(monkeypatch, 12, "NVML Shared Library Not Found")
    assert read_nvml() is None
    library(monkeypatch, 9, "Driver Not Loaded")
    assert read_nvml().source == "none"  # nvidia-smi would have no other answer


def test_a_driver_that_does_not_work_is_one_and_the_library_is_let_go_after_the_question(monkeypatch):
    library(monkeypatch, 18, "RM has detected an NVML/RM version mismatch.")
    with pytest.raises(TopologyError, match="NVML does not start: RM has detected"):
        read_nvml()
    called = library(monkeypatch)
    topology = read_nvml()
    assert (topology.source, topology.gpus, called) == ("NVML", (), ["start", "end"])
