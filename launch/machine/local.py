"""The topology of this host: GPUs from the first tool that responds, everything else from the kernel."""

import contextlib
import dataclasses
import fcntl
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from launch.errors import ProcessError
from launch.machine import nvidia_smi, nvml, system
from launch.machine.pcie import with_pcie
from launch.machine.topology import ANOTHER_RUN, Gpu, Topology, is_busy
from launch.process import ask, find

DRIVER_TIMEOUT_S = 30.0  # a driver may need seconds for each GPU to wake up
# run/rank/bind.py locks a file for each GPU of a run. The kernel keeps such a lock for one process, the one that stands
# for the host's first rank, and drops it when that process ends; child processes do not keep it. The folder is closed
# to other users, and a container may have a private /tmp: for runs that cannot be seen here, only the driver reports
# use of a GPU.
LOCKS = f"/tmp/hvdlaunch-{os.getuid()}"  # noqa: S108 (as in launch.run.rank.bind, which checks it)
FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl.h: type, whence, start, length, pid
NO_GPU = (6, 9, 12)  # nvidia-smi's status without a device, a driver, a library


def local_topology(*, gpus: bool) -> Topology:
    """Return the topology of this host, with GPUs from NVML, or from nvidia-smi if NVML cannot be loaded.

    ProcessError if a driver takes more than DRIVER_TIMEOUT_S.
    """
    topology = _with_locks(_gpu_topology()) if gpus else Topology(source="none")
    return dataclasses.replace(
        with_pcie(topology, system.SYSFS),
        numa_nodes=system.numa_nodes(system.SYSFS, frozenset(os.sched_getaffinity(0))),
        interfaces=system.interfaces(),
        cpu_quota=system.cpu_quota(system.ROOT),
    )


def _with_locks(topology: Topology) -> Topology:
    """Mark the GPUs that other runs of this user hold as busy."""
    held = held_gpus(gpu.uuid for gpu in topology.gpus if gpu.uuid is not None)

    def mark(gpu: Gpu) -> str | None:
        pid = held.get(gpu.uuid or "")
        if pid is None or (gpu.unusable is not None and not is_busy(gpu)):
            return gpu.unusable
        return f"busy: pid {pid}, {ANOTHER_RUN}" if pid else f"busy: {ANOTHER_RUN} holds it"

    return topology.marked(mark)


def _gpu_topology() -> Topology:
    if (topology := _within_time(nvml.read_nvml)) is not None:
        return topology
    matrix = ask(["nvidia-smi", "topo", "-m"], timeout_s=DRIVER_TIMEOUT_S) if find("nvidia-smi") else None
    if matrix is None or matrix.status in NO_GPU:
        return Topology(source="none")
    query = _queried(f"--query-gpu={nvidia_smi.QUERY}")
    if matrix.status and query is None:
        lines = (matrix.err or matrix.out).strip().splitlines() or ["nothing"]
        raise ProcessError(f"nvidia-smi topo -m failed with status {matrix.status} and said: {lines[0]}")
    return nvidia_smi.from_nvidia_smi(
        None if matrix.status else matrix.out,  # it fails if a GPU is lost
        query,
        _queried(f"--query-compute-apps={nvidia_smi.QUERY_APPS}"),
        sockets_gbps=system.sockets_gbps(),
    )


def _within_time(read: Callable[[], Topology | None]) -> Topology | None:
    """Return the result of `read`; ProcessError if a hanging driver exceeds the timeout."""
    answer: Future[Topology | None] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:  # noqa: BLE001 (raised again in the waiting thread)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(DRIVER_TIMEOUT_S)
    except TimeoutError:
        raise ProcessError(
            f"NVML did not respond within {DRIVER_TIMEOUT_S:g} s. Check nvidia-smi. To keep the driver loaded, run "
            "nvidia-smi -pm 1."
        ) from None


def _queried(question: str) -> str | None:
    answer = ask(["nvidia-smi", question, "--format=csv,noheader"], timeout_s=DRIVER_TIMEOUT_S)
    if answer.status and not re.search(r"^(\d+|GPU-\S+), ", answer.out, re.MULTILINE):  # else one GPU is lost
        return None
    return "\n".join([answer.out, *(line for line in answer.err.splitlines() if nvidia_smi.LOST.search(line))])


def held_gpus(uuids: Iterable[str]) -> dict[str, int]:
    """Return the GPUs held by a run, by UUID, with the pid of its first rank on this host, 0 if it is hidden."""
    with contextlib.suppress(OSError), _opened(LOCKS, os.O_RDONLY | os.O_DIRECTORY) as folder:
        if os.fstat(folder).st_uid == os.getuid():
            holders = {uuid: _holder(folder, f"{uuid.replace('/', '_')}.lock") for uuid in uuids}
            return {uuid: pid for uuid, pid in holders.items() if pid is not None}
    return {}


def _holder(folder: int, name: str) -> int | None:
    """Return the process that has locked this file; None if it is not locked, or on a file system without locks."""
    with contextlib.suppress(OSError), _opened(name, os.O_RDONLY, folder) as file:
        lock_request = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock_request))
        return None if kind == fcntl.F_UNLCK else pid
    return None


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    number = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)
