"""The topology of this host: its GPUs by the first tool that answers, all else by the kernel."""

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from launch.errors import ProcessError
from launch.machine import nvidia_smi, nvml, system
from launch.machine.speeds import between_sockets
from launch.machine.topology import Topology
from launch.process import Answer, ask, find

TIMEOUT_S = 10.0  # a driver that wakes up takes seconds
NO_GPU = (6, 9, 12)  # nvidia-smi's status where there is no device, no driver, no library


def local_topology(*, gpus: bool) -> Topology:
    """The topology of this host, its GPUs by NVML, else nvidia-smi; no GPU where none answers."""
    return dataclasses.replace(
        _gpu_topology() if gpus else Topology(source="none"),
        numa_nodes=system.numa_nodes(system.SYSFS, frozenset(os.sched_getaffinity(0))),
        interfaces=system.interfaces(),
    )


def _gpu_topology() -> Topology:
    if (topology := _within_time(nvml.read_nvml)) is not None:
        return topology
    if find("nvidia-smi"):
        matrix = ask(["nvidia-smi", "topo", "-m"], timeout_s=TIMEOUT_S)
        if matrix.status in NO_GPU:
            return Topology(source="none")
        return nvidia_smi.from_nvidia_smi(
            _output("nvidia-smi topo -m", matrix),
            _output_or_none("nvidia-smi", f"--query-gpu={nvidia_smi.QUERY}", "--format=csv,noheader"),
            _output_or_none("nvidia-smi", f"--query-compute-apps={nvidia_smi.QUERY_APPS}", "--format=csv,noheader"),
            sockets_gbps=between_sockets(system.cpuinfo()),
        )
    return Topology(source="none")


def _within_time(read: Callable[[], Topology | None]) -> Topology | None:
    """What `read` returns; ProcessError if a driver that hangs keeps it too long."""
    answer: Future[Topology | None] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(TIMEOUT_S)
    except TimeoutError:
        raise ProcessError(f"NVML gave no answer in {TIMEOUT_S:g} s: see whether nvidia-smi does") from None


def _output(command: str, answer: Answer) -> str:
    if answer.status:
        lines = (answer.err or answer.out).strip().splitlines() or ["nothing"]
        raise ProcessError(f"{command} failed with status {answer.status} and said: {lines[0]}")
    return answer.out


def _output_or_none(*argv: str) -> str | None:
    answer = ask(argv, timeout_s=TIMEOUT_S)
    return None if answer.status else answer.out
