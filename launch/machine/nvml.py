"""The NVIDIA driver's library -> a topology."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.errors import TopologyError, harmless
from launch.machine import system
from launch.machine.nvidia import PCIE_GBPS, NcclSpeeds, speeds_by_name
from launch.machine.topology import Gpu, Link, Nic, Topology, link_between, why_unusable

# nvmlGpuTopologyLevel_t; 0: on the same board
_KINDS: dict[Any, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_TO_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_UNCORRECTED, _VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
_NO_DRIVER, _NO_LIBRARY = 9, 12  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND
_LOST, _NEEDS_RESET = 15, 16  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
_MASK_WORDS = 128  # of 64 cores each
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2
_READ, _WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t
# nvmlClocksEventReasons
_BY_HEAT, _BY_POWER, _BY_HARDWARE = 0x20 | 0x40, 0x80, 0x08  # the last one also for other hardware reasons
_P2P_OK, _P2P_UNKNOWN = 0, 6  # nvmlGpuP2PStatus_t


class _Device:
    """A GPU as seen by NVML; values that its driver does not support are None."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._errors = (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))
        self.index = index
        self.fault: str | None = None
        self.handle: Any = None
        try:
            self.handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except self._errors as error:
            self.fault = f"does not answer ({error})"

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call `nvmlDeviceGet<question>`."""
        function = getattr(self._nvml, f"nvmlDeviceGet{question}", None)
        if function is None or self.handle is None:
            return None
        try:
            return function(self.handle, *arguments)
        except self._errors as error:
            if getattr(error, "value", None) in {_LOST, _NEEDS_RESET}:
                self.fault = f"does not answer ({error})"
            return None


def read_nvml() -> Topology | None:
    """Return this machine's topology; None if NVML cannot be loaded.

    Raises:
        TopologyError: the driver is present, but does not work.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == _NO_LIBRARY:
            return None
        if error.value == _NO_DRIVER:
            return Topology(source="none")
        raise TopologyError(f"NVML does not start: {error}; run nvidia-smi, which has the same trouble") from None
    try:
        return from_nvml(pynvml, sockets_gbps=system.sockets_gbps())
    finally:
        pynvml.nvmlShutdown()


def from_nvml(nvml: Any, *, sysfs: Path = system.SYSFS, sockets_gbps: float | None = None) -> Topology:
    """Return the topology of the GPUs that `nvml` sees, the initialised module pynvml or one with its functions.

    NUMA nodes, NICs and the paths to them are those in `sysfs`; `sockets_gbps` are between the CPU sockets, if known.
    """
    devices = [_Device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    pcis = [_pci(device.ask("PciInfo")) for device in devices]
    folders = [system.pci_device(sysfs, pci) for pci in pcis]
    gpus = tuple(_gpu(device, pci, folder) for device, pci, folder in zip(devices, pcis, folders, strict=True))
    nvlinks = _nvlinks(devices, pcis, getattr(nvml, "NVML_NVLINK_MAX_LINKS", 36))
    speeds = [_speeds(device, gpu.name) for device, gpu in zip(devices, gpus, strict=True)]

    def between(a: int, b: int) -> Link:
        if a == b:
            return Link(kind="X")
        level = -1 if devices[b].handle is None else devices[a].ask("TopologyCommonAncestor", devices[b].handle)
        kind = "NV" if nvlinks[a][b] else _KINDS.get(level, "") or system.pcie_kind(folders[a], folders[b])
        link = link_between(kind, nvlinks[a][b], (speeds[a], speeds[b]), sockets_gbps)
        return replace(link, p2p=_p2p(devices[a], devices[b]))

    places = range(len(gpus))
    half = {(a, b): between(a, b) for a in places for b in places[: a + 1]}
    return Topology(
        source="NVML",
        gpus=gpus,
        links=tuple(tuple(half[max(a, b), min(a, b)] for b in places) for a in places),
        nics=tuple(
            Nic(
                name=name,
                links=tuple(Link(kind=system.pcie_kind(folder, adapter)) for folder in folders),
                ports=system.rdma_ports(sysfs, name),
            )
            for name, adapter in system.rdma_devices(sysfs)
        ),
    )


def _pci(info: Any) -> str | None:
    return None if info is None else f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _speeds(device: _Device, name: str | None) -> NcclSpeeds:
    """Return the speeds of a GPU, in its slot, which may be of an older PCIe generation."""
    speeds = speeds_by_name(name) or NcclSpeeds()
    return replace(speeds, pcie_gbps=PCIE_GBPS.get(device.ask("MaxPcieLinkGeneration"), speeds.pcie_gbps))


def _gpu(device: _Device, pci: str | None, folder: Path | None) -> Gpu:
    mask = device.ask("CpuAffinity", _MASK_WORDS) or ()
    ecc = device.ask("TotalEccErrors", _UNCORRECTED, _VOLATILE)
    remapped = device.ask("RemappedRows")  # corrected, uncorrected, is one pending, has one failed
    mig = device.ask("MigMode")  # now, after the next reset
    processes = device.ask("ComputeRunningProcesses") or ()
    uuid, name = (text and harmless(text) for text in (device.ask("UUID"), device.ask("Name")))
    faults = {
        device.fault: device.fault,
        f"{ecc} uncorrected memory errors since its driver was loaded": ecc,
        "a row of its memory could not be remapped": remapped and remapped[3],
    }
    return Gpu(
        index=device.index,
        cores=tuple(64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1),
        numa=system.numa_of(folder),
        uuid=uuid,
        name=name,
        pci=pci,
        unusable=why_unusable(
            mig=bool(mig and mig[0]),
            fault=next((fault for fault, applies in faults.items() if applies), None),
            pids=[process.pid for process in processes],
            hidden_mib=_hidden_mib(device),
        ),
        drawbacks=_drawbacks(device),
    )


def _hidden_mib(device: _Device) -> int:
    """Return the MiB in use that no listed process explains; 0 if they do not indicate another run."""
    # A display uses some memory. If GPUs are NUMA nodes, pages of the system are also counted.
    if device.ask("DisplayActive") or device.ask("GraphicsRunningProcesses") or device.ask("NumaNodeId") is not None:
        return 0
    memory = device.ask("MemoryInfo", _MEMORY_V2) or device.ask("MemoryInfo")
    # Not `used`: drivers differ on whether it includes reserved memory.
    return 0 if memory is None else (memory.total - memory.free - getattr(memory, "reserved", 0)) >> 20


def _drawbacks(device: _Device) -> tuple[str, ...]:
    """Return what may slow a GPU."""
    width, widest = device.ask("CurrPcieLinkWidth"), device.ask("MaxPcieLinkWidth")
    current, possible = device.ask("CurrPcieLinkGeneration"), device.ask("MaxPcieLinkGeneration")  # in this slot
    own = device.ask("GpuMaxPcieLinkGeneration")  # in the best slot
    if device.ask("PerformanceState") != 0:
        current = possible  # an idle GPU lowers it to save power
    slowed = device.ask("CurrentClocksEventReasons") or device.ask("CurrentClocksThrottleReasons") or 0
    remapped = device.ask("RemappedRows")
    facts = {
        f"{width} of {widest} PCIe lanes": width and widest and width < widest,
        f"PCIe generation {current} of {own or possible}": current and current < (own or possible or 0),
        "drives a display": device.ask("DisplayActive"),
        "slowed down by heat": slowed & _BY_HEAT,
        "slowed down by its power supply": slowed & _BY_POWER,
        "slowed down by its hardware": slowed & _BY_HARDWARE and not slowed & (_BY_HEAT | _BY_POWER),
        "a row of its memory waits to be remapped": remapped and remapped[2],
        "a page of its memory waits to be retired": device.ask("RetiredPagesPendingStatus"),
    }
    return tuple(text for text, applies in facts.items() if applies)


def _p2p(a: _Device, b: _Device) -> bool:
    """Return whether two GPUs support P2P reads and writes; True if the driver does not report it."""
    if b.handle is None:
        return True
    return {a.ask("P2PStatus", b.handle, access) for access in (_READ, _WRITE)} <= {None, _P2P_OK, _P2P_UNKNOWN}


def _nvlinks(devices: list[_Device], pcis: list[str | None], max_links: int) -> list[list[int]]:
    """Return the number of NVLinks of each pair: direct ones, else the smaller number of links to NVSwitches."""
    direct = [[0] * len(devices) for _ in devices]
    to_switch = [0] * len(devices)
    for a, device in enumerate(devices):
        for link_number in range(max_links):
            if device.ask("NvLinkState", link_number) != 1:
                continue
            remote = _pci(device.ask("NvLinkRemotePciInfo", link_number))
            if remote is not None and remote in pcis:
                direct[a][pcis.index(remote)] += 1
            elif device.ask("NvLinkRemoteDeviceType", link_number) == _TO_SWITCH:
                to_switch[a] += 1
    return [
        [min(direct[a][b], direct[b][a]) or min(to_switch[a], to_switch[b]) for b in range(len(devices))]
        for a in range(len(devices))
    ]
