# ruff: noqa: N802, N815 (the names are the library's)
"""One machine, told twice: by a stand-in for the driver's library with a made-up sysfs, and by nvidia-smi's texts."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from launch.errors import TopologyError
from launch.machine.nvidia_smi import from_nvidia_smi
from launch.machine.nvml import from_nvml, read_nvml
from launch.machine.topology import Link, Port

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


class Nvml:
    """The part of pynvml that is asked, for the machine above; a GPU's handle is its index."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 6

    def __init__(self):
        self.remotes = [[] for _ in BUSES]
        for a, b in NVLINKS:
            self.remotes[int(a)].append(int(b))
            self.remotes[int(b)].append(int(a))
        self.processes = {3: [SimpleNamespace(pid=4242)]}

    def nvmlDeviceGetCount(self):
        return len(BUSES)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{gpu}{gpu}"

    def nvmlDeviceGetName(self, gpu):
        return NAME

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(domain=0, bus=BUSES[gpu], device=0)

    def nvmlDeviceGetCpuAffinity(self, gpu, words):
        mask = [0b1111, 0b10000] if gpu < 4 else [0b1111_0000]
        return [*mask, *[0] * (words - len(mask))]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return self.processes.get(gpu, [])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu):
        return 3

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 50 if (a < 4) != (b < 4) else 10 if a // 2 == b // 2 else 40

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        if link >= len(self.remotes[gpu]):
            raise NVMLError(2, "Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return self.nvmlDeviceGetPciInfo(self.remotes[gpu][link])

    nvmlDeviceGetNvLinkRemoteDeviceType = lacking
    nvmlDeviceGetMigMode = lacking
    nvmlDeviceGetTotalEccErrors = lacking
    nvmlDeviceGetRemappedRows = lacking


@pytest.fixture
def sysfs(tmp_path):
    roots = {0x06: "05", 0x07: "05", 0x0A: "09", 0x0B: "09", 0x85: "84", 0x86: "84", 0x89: "88", 0x8A: "88"}
    nics = {"mlx5_0": "05", "mlx5_2": "09", "mlx5_4": "84", "mlx5_10": "88"}
    places = {f"0000:{bus:02x}:00.0": (root, f"{i}") for i, (bus, root) in enumerate(roots.items())}
    places |= {f"0000:{root}:1f.0": (root, "f") for root in nics.values()}
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for pci, (root, port) in places.items():
        switch = f"devices/pci0000:{root}/0000:{root}:00.0/0000:{root}:01.0/0000:{root}:0{port}.1"
        folder = tmp_path / switch / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text("0\n" if root in {"05", "09"} else "1\n")
        (tmp_path / "bus/pci/devices" / pci).symlink_to(folder)
    for name, root in nics.items():
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(tmp_path / f"bus/pci/devices/0000:{root}:1f.0")
    return tmp_path


@pytest.mark.parametrize("sockets_gbps", [None, 10.0])
def test_the_library_and_the_tool_give_the_same_topology(sysfs, sockets_gbps):
    by_library = from_nvml(Nvml(), sysfs=sysfs, sockets_gbps=sockets_gbps)
    by_tool = from_nvidia_smi(MATRIX, QUERY, APPS, sockets_gbps=sockets_gbps)
    assert by_library.source == "NVML"
    assert dataclasses.replace(by_library, source="nvidia-smi") == by_tool
    assert by_tool.links[0][3] == Link(kind="NV", count=2, gbps=40.0)
    assert by_tool.links[0][5] == Link(kind="SYS", gbps=sockets_gbps)
    assert [gpu.unusable for gpu in by_tool.gpus] == [None] * 3 + ["busy: pid 4242"] + [None] * 4
    assert by_tool.gpus[7].pci == "0000:8a:00.0"
    assert by_tool.gpus[0].cores == (0, 1, 2, 3, 68)


class Switched(Nvml):
    """GPUs whose links all end in NVSwitches; of GPU 2's twelve, two are broken."""

    NVML_NVLINK_MAX_LINKS = 18

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        return int(link < (10 if gpu == 2 else 12))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(domain=0, bus=0xC0 + link, device=0)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return 2


def test_through_switches_the_gpu_with_fewer_links_counts(sysfs):
    links = from_nvml(Switched(), sysfs=sysfs).links
    assert (links[0][7].count, links[0][2].count, links[2][0].count) == (12, 10, 10)


class Direct(Switched):
    nvmlDeviceGetNvLinkRemoteDeviceType = lacking


def test_links_to_something_unknown_do_not_count(sysfs):
    links = from_nvml(Direct(), sysfs=sysfs).links
    assert [links[0][1].kind, links[0][2].kind, links[0][7].kind] == ["PIX", "NODE", "SYS"]


class Bare(Nvml):
    """An old driver that answers nothing but how many there are."""

    def __getattribute__(self, name):
        if name.startswith("nvmlDeviceGet") and name not in {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}:
            if name.endswith(("MigMode", "RemappedRows")):
                raise AttributeError(name)  # nor does its module know these
            return lacking
        return super().__getattribute__(name)


def test_what_a_driver_does_not_say_is_not_known(sysfs):
    topology = from_nvml(Bare(), sysfs=sysfs)
    assert len(topology.gpus) == 8
    for i, gpu in enumerate(topology.gpus):
        assert gpu == dataclasses.replace(
            gpu, index=i, cores=(), numa=(), uuid=None, name=None, pci=None, unusable=None
        )
    assert {link for i, row in enumerate(topology.links) for j, link in enumerate(row) if i != j} == {Link(kind="SYS")}


class NoAncestor(Switched):
    nvmlDeviceGetTopologyCommonAncestor = lacking
    nvmlDeviceGetNvLinkState = lacking


def test_the_way_over_pcie_is_found_without_the_driver_too(sysfs):
    links = from_nvml(NoAncestor(), sysfs=sysfs).links
    assert [links[0][b].kind for b in (1, 2, 4)] == ["PIX", "NODE", "SYS"]
    assert links[0][1].gbps == 12.0


class OneBoard(Direct):
    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return 0


def test_two_gpus_of_one_board_have_one_switch_at_most(sysfs):
    assert from_nvml(OneBoard(), sysfs=sysfs).links[0][7].kind == "PIX"


class Ill(Nvml):
    def nvmlDeviceGetHandleByIndex(self, index):
        if index == 0:
            raise NVMLError(15, "GPU is lost")
        return index

    def nvmlDeviceGetMigMode(self, gpu):
        return [int(gpu == 1), 0]

    def nvmlDeviceGetTotalEccErrors(self, gpu, error, counter):
        assert (error, counter) == (1, 0)
        if gpu == 2:
            raise NVMLError(16, "GPU requires restart")
        return 5 if gpu == 4 else 0

    def nvmlDeviceGetRemappedRows(self, gpu):
        return (3, 1, 1, int(gpu == 5))


def test_says_which_gpus_cannot_be_had_and_why(sysfs):
    topology = from_nvml(Ill(), sysfs=sysfs)
    assert [gpu.unusable for gpu in topology.gpus] == [
        "unhealthy: does not answer (GPU is lost)",
        "in MIG mode",
        "unhealthy: does not answer (GPU requires restart)",
        "busy: pid 4242",
        "unhealthy: 5 uncorrected memory errors since its driver was loaded",
        "unhealthy: a row of its memory could not be remapped",
        None,
        None,
    ]
    assert topology.gpus[0].uuid is None
    assert topology.links[0][3] == topology.links[3][0] == Link(kind="SYS")


class SlowSlots(Nvml):
    def nvmlDeviceGetName(self, gpu):
        return "NVIDIA A100-PCIE-40GB"


def test_a_slot_of_an_older_generation_slows_the_gpu(sysfs):
    links = from_nvml(SlowSlots(), sysfs=sysfs, sockets_gbps=16.0).links
    assert (links[0][5].kind, links[0][5].gbps) == ("SYS", 12.0)


class InUse(Nvml):
    """GPUs without processes, whose memory tells: by GPU, MiB in all, free and reserved."""

    MIB = ((16384, 15000, 360), (16384, 15000, 359), (16384, 15104, 0), (16384, 9000, 0), (16384, 9000, 0), (1, 1, 0))
    OLD_DRIVER = (2,)

    def __init__(self):
        super().__init__()
        self.processes.clear()

    def nvmlDeviceGetMemoryInfo(self, gpu, version=None):
        if version and gpu in self.OLD_DRIVER:
            raise NVMLError(13, "Function Not Found")
        total, free, reserved = (mib << 20 for mib in self.MIB[min(gpu, 5)])
        facts = SimpleNamespace(total=total, free=free, used=total - free)
        if version:
            assert version == 0x02000028
            facts.reserved = reserved
        return facts

    def nvmlDeviceGetDisplayActive(self, gpu):
        return int(gpu == 3)

    def nvmlDeviceGetNumaNodeId(self, gpu):
        return 8 if gpu == 4 else lacking()


def test_memory_that_no_process_explains_is_in_use_by_one_that_is_hidden(sysfs):
    found = [gpu.unusable for gpu in from_nvml(InUse(), sysfs=sysfs).gpus]
    hidden = "busy: {} MiB in use by a process that is not seen from here"
    # Then a driver of before reserved memory was told apart, a display's GPU, and one whose memory the system uses.
    assert found[:5] == [None, hidden.format(1025), hidden.format(1280), None, None]


class Blocked(Nvml):
    """GPU 0 may read from GPU 1 but not write to it; of GPU 2 and 3 the driver does not know."""

    def nvmlDeviceGetP2PStatus(self, a, b, access):
        return {(1, 0): (0, 2)[access], (3, 2): 6, (7, 6): 1}.get((a, b), 0)


def test_pairs_that_may_not_copy_straight_are_told(sysfs):
    links = from_nvml(Blocked(), sysfs=sysfs).links
    blocked = [(a, b) for a, row in enumerate(links) for b, link in enumerate(row) if not link.p2p]
    assert blocked == [(0, 1), (1, 0), (6, 7), (7, 6)]
    assert links[0][1] == Link(kind="NV", count=1, gbps=20.0, p2p=False)


class Slowed(Nvml):
    """By GPU: lanes now and at most, generation now, at most here, at most of the GPU, performance state, display."""

    FACTS = (
        (16, 16, 4, 4, 4, 0, 0),
        (8, 16, 4, 4, 4, 0, 0),
        (16, 16, 1, 4, 4, 8, 0),  # idle
        (16, 16, 1, 4, 4, 0, 0),
        (16, 16, 1, 3, 4, 8, 1),
    )

    def fact(self, gpu, number):
        return self.FACTS[gpu][number] if gpu < len(self.FACTS) else lacking()

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu):
        return self.fact(gpu, 0)

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu):
        return self.fact(gpu, 1)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu):
        return self.fact(gpu, 2)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu):
        return self.fact(gpu, 3)

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, gpu):
        return self.fact(gpu, 4)

    def nvmlDeviceGetPerformanceState(self, gpu):
        return self.fact(gpu, 5)

    def nvmlDeviceGetDisplayActive(self, gpu):
        return self.fact(gpu, 6)


def test_says_what_may_slow_a_gpu(sysfs):
    assert [gpu.drawbacks for gpu in from_nvml(Slowed(), sysfs=sysfs).gpus] == [
        (),
        ("8 of 16 PCIe lanes",),
        (),
        ("PCIe generation 1 of 4",),
        ("PCIe generation 3 of 4", "drives a display"),
        *[()] * 3,
    ]


class Throttled(Nvml):
    """By GPU: why its clocks are lower than they could be, and whether a row of its memory waits for a reset."""

    REASONS = (0x1, 0x20, 0x8 | 0x40, 0x8 | 0x80, 0x8, 0x4)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self.REASONS[gpu] if gpu < len(self.REASONS) else lacking()

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return 0x80 if gpu == 7 else lacking()

    def nvmlDeviceGetRemappedRows(self, gpu):
        return (0, 0, int(gpu == 6), 0)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu):
        return int(gpu == 7)


def test_says_which_gpus_are_slowed_down_and_which_wait_for_a_reset(sysfs):
    heat, power = "slowed down by heat", "slowed down by its power supply"
    assert [gpu.drawbacks for gpu in from_nvml(Throttled(), sysfs=sysfs).gpus] == [
        (),  # idle
        (heat,),
        (heat,),
        (power,),
        ("slowed down by its hardware",),
        (),  # at its power limit, as it should be
        ("a row of its memory waits to be remapped",),
        (power, "a page of its memory waits to be retired"),  # an older driver
    ]


def test_knows_the_ports_of_the_adapters(sysfs):
    port = sysfs / "class/infiniband/mlx5_2/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "link_layer").write_text("InfiniBand\n")
    ports = {nic.name: nic.ports for nic in from_nvml(Nvml(), sysfs=sysfs).nics}
    assert ports.pop("mlx5_2") == (Port(number=1, active=False, ethernet=False),)
    assert set(ports.values()) == {()}


def module(init):
    ended = []
    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=init, nvmlShutdown=lambda: ended.append(True), nvmlDeviceGetCount=lambda: 0
    ), ended


def test_a_machine_without_the_module_or_the_driver_is_not_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml() is None

    def no_library():
        raise NVMLError(12, "NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", module(no_library)[0])
    assert read_nvml() is None

    def no_driver():
        raise NVMLError(9, "Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", module(no_driver)[0])
    assert read_nvml().source == "none"  # nvidia-smi would have no other answer


def test_a_driver_that_does_not_work_is_one(monkeypatch):
    def mismatch():
        raise NVMLError(18, "RM has detected an NVML/RM version mismatch.")

    monkeypatch.setitem(sys.modules, "pynvml", module(mismatch)[0])
    with pytest.raises(TopologyError, match="NVML does not start: RM has detected"):
        read_nvml()


def test_the_library_is_let_go_after_the_question(monkeypatch):
    pynvml, ended = module(lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    topology = read_nvml()
    assert topology is not None
    assert (topology.source, topology.gpus) == ("NVML", ())
    assert ended == [True]


def test_what_a_driver_says_moves_no_cursor(sysfs):
    nvml = Nvml()
    nvml.nvmlDeviceGetUUID = lambda gpu: f"GPU-\x1b[2J{gpu}"
    nvml.nvmlDeviceGetName = lambda _: "V100\x07"
    (first, *_) = from_nvml(nvml, sysfs=sysfs).gpus
    assert (first.uuid, first.name) == (r"GPU-\x1b[2J0", r"V100\x07")
    (first, *_) = from_nvidia_smi(MATRIX, QUERY.replace("GPU-00", "GPU-\x1b[2J"), APPS).gpus
    assert first.uuid == r"GPU-\x1b[2J"
