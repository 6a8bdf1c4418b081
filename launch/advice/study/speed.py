"""The speed of GPUs, or of the cores of hosts without them, by hvdtrain.speed on all hosts at once."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.documents import parse
from launch.errors import HostError, LaunchError
from launch.hosts.host_facts import HostFacts
from launch.hosts.probe import at_once, is_local
from launch.machine.decode import decode
from launch.machine.topology import Gpu
from launch.placement.findings import Finding, warning
from launch.placement.gpu_findings import SLOWED
from launch.process import ask
from launch.run.start.request import RunRequest

SPEED_S = 3.0  # for each of the two
LIMIT_S = 120.0  # with the import of torch from a slow disk
MARK = "hvdtrain-speed "
LEAST = 0.9  # of the median of its peers; what reaches less is named
ABOUT = "speed"
OTHERS = "see what else runs there (top), its clock and its cooling, or leave the host out"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The measured speed of a GPU, or of all cores of a host."""

    name: str  # of the model: only devices of one name are peers
    tflops: float  # of a matrix product
    gb_per_s: float  # read and written by a copy in memory


KINDS = (("matrix product", "tflops", "TFLOP/s"), ("memory copy", "gb_per_s", "GB/s"))


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds of all hosts."""

    hosts: Mapping[str, Sequence[Speed]]  # of each measured GPU, or of the cores
    gpus: Mapping[str, Sequence[int]]  # the indices of these GPUs; empty for cores

    def lines(self) -> list[str]:
        """Return a line for each model."""
        by_name: dict[str, list[Speed]] = {}
        for own in self.hosts.values():
            for speed in own:
                by_name.setdefault(speed.name, []).append(speed)
        return [
            f"{name}: {_shown(statistics.median(each.tflops for each in alike))} TFLOP/s, "
            f"{_shown(statistics.median(each.gb_per_s for each in alike))} GB/s, the median of {len(alike)}"
            for name, alike in by_name.items()
        ]


NO_SPEEDS = Speeds(hosts={}, gpus={})


def measure_speeds(request: RunRequest, facts: Mapping[str, HostFacts], folder: Path) -> tuple[Speeds, list[Finding]]:
    """Measure the free GPUs of the hosts, or their cores, at the same time; nothing without at least two devices.

    A host that cannot be measured is a finding; one without hvdtrain is left out.
    """
    gpus = {host: _gpus_of(own, request) for host, own in facts.items()}
    hosts = [host for host in facts if _has_torch(facts[host]) and (gpus[host] or not facts[host].topology.gpus)]
    if sum(len(gpus[host]) or 1 for host in hosts) < 2 or request.apptainer is not None:
        return NO_SPEEDS, []

    def speed_of(host: str) -> tuple[Speed, ...] | LaunchError:
        words = [sys.executable, "-P", *_words(gpus[host], SPEED_S)]
        try:
            if is_local(host):
                text = ask(words, timeout_s=LIMIT_S).out.rpartition(MARK)[2]
            else:
                text = request.ssh.ask(host, words, str(folder), mark=MARK, timeout_s=LIMIT_S)
            found: tuple[Speed, ...] = decode(parse(text), tuple[Speed, ...], "its speeds")
            if len(found) == (len(gpus[host]) or 1):
                return found
        except LaunchError as error:
            return error
        except ValueError:
            pass
        return HostError("it has not printed a speed for each device")

    answers = at_once(speed_of, hosts)
    failed = {host: answer for host, answer in answers.items() if isinstance(answer, LaunchError)}
    findings = [
        warning(
            host,
            ABOUT,
            f"not measured: {str(why).removeprefix(f'host {host}: ')}",
            f"try `{' '.join(['python', *_words(gpus[host], 3)])}` there",
        )
        for host, why in failed.items()
    ]
    measured = {host: answer for host, answer in answers.items() if not isinstance(answer, LaunchError)}
    speeds = Speeds(hosts=measured, gpus={host: [gpu.index for gpu in gpus[host]] for host in measured})
    return speeds, [*findings, *slow_devices(speeds)]


def _words(gpus: Sequence[Gpu], seconds: float) -> list[str]:
    """Return Python's arguments to measure these GPUs, or the cores if there are none."""
    names = ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)
    return ["-m", "hvdtrain.speed", f"{seconds:g}", *([names] if names else [])]


def slow_devices(speeds: Speeds) -> list[Finding]:
    """Return the hosts with devices that reach less than LEAST of the median of all others of their model."""
    findings = []
    every = [(host, place, speed) for host, own in speeds.hosts.items() for place, speed in enumerate(own)]
    for what, field, unit in KINDS:
        slow: dict[str, list[tuple[str, float]]] = {}  # by host, devices and the median of their peers
        for host, place, speed in every:
            peers = [getattr(one, field) for at, n, one in every if one.name == speed.name and (at, n) != (host, place)]
            value = getattr(speed, field)
            if peers and value < LEAST * (usual := statistics.median(peers)):
                who = f"GPU {speeds.gpus[host][place]}" if speeds.gpus[host] else "its cores"
                slow.setdefault(host, []).append((f"{who} {_shown(value)}", usual))
        for host, own in slow.items():
            devices, usual = ", ".join(device for device, _ in own), own[0][1]
            problem = f"slow {what}: {devices} {unit}, the median of its peers is {_shown(usual)}"
            findings.append(warning(host, ABOUT, problem, SLOWED if speeds.gpus[host] else OTHERS))
    return findings


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gpus_of(own: HostFacts, request: RunRequest) -> list[Gpu]:
    """Return the free GPUs that --gpus names."""
    if request.gpus == "none":
        return []
    return [
        gpu
        for gpu in own.topology.gpus
        if gpu.unusable is None and (request.gpus == "all" or gpu.index in request.gpus)
    ]


def _has_torch(own: HostFacts) -> bool:
    software = own.condition.software if own.condition else None
    return software is not None and None not in (software.project, software.torch)
