"""Bandwidths measured by hvdtrain.bandwidth: one job on each host with several ranks, then one over all hosts.

The job over all hosts measures every two of them, in rounds in which each host is in at most one pair: the 28 pairs of
8 hosts need one start of ranks and 7 rounds. Jobs run one at a time, so that they do not compete for the network or
cores. With --measured RUN a job for each all-reduce algorithm follows, at the gradient bytes of that run: MPI and NCCL
read their variables at start. Every second round runs in reverse order. After the first round, algorithms far behind
the fastest are dropped.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launch.advice.study.check import STDERR, Checked
from launch.advice.study.links import Bandwidth, from_report, slow_ones
from launch.advice.study.record import scratch
from launch.documents import parse
from launch.errors import LaunchError
from launch.files import read_text
from launch.hosts.host import Host
from launch.hosts.host_facts import HostFacts
from launch.output import say
from launch.placement.allreduce import TWO_LEVEL, USUAL, ComparedSums, TimedWay, ways
from launch.placement.findings import Finding, errors_first, from_error
from launch.placement.slots import RankSlot, with_slots
from launch.run.start.decide import own_hosts
from launch.run.start.prepare import job_of, prepare
from launch.run.start.render import PreparedRun
from launch.run.start.request import RunRequest, listed
from launch.run.supervise.nccl import lines_of, run_logged, unexpected_transport, with_log
from launch.run.supervise.run import RunResult, run

REPEATS = 5
# On slow links Open MPI over TCP would often send the two ways of an exchange one after the other: half the speed.
BOTH_WAYS = {"OMPI_MCA_btl_tcp_flags": "1"}
LIMIT_S = 5.0  # for all sizes of one sum, or of one pair: on a slow network the largest sizes are skipped
JOB_S = 300  # maximum, in addition to LIMIT_S for each host
ROUNDS = 3
BEHIND = 1.2  # times the fastest median: slower algorithms are not measured again

# (name, variables, arguments for hvdtrain.bandwidth) -> the seconds of each sum; None if it failed.
Measure = Callable[[str, Mapping[str, str], Sequence[str]], tuple[float, ...] | None]


def with_bandwidth(
    checked: Checked, request: RunRequest, environment: Mapping[str, str], *, nccl_debug: bool
) -> Checked:
    """Add measurements between ranks on the hosts, and slow results as findings; unchanged if a host has an error.

    A job that cannot be measured is a finding. SystemExit if a signal ends a job.
    """
    facts = {name: own for name, own in checked.hosts.items() if own is not None}
    if checked.shared is not None:
        request = replace(request, network=checked.shared.name)  # tried by the check
    jobs = _Jobs(request=request, facts=facts, environment=environment, log=nccl_debug)
    if checked.status:
        jobs.add_finding("warning", tuple(facts), "fix the errors first")
        return replace(checked, findings=errors_first([*checked.findings, *jobs.findings]))
    names = listed(request, environment) or own_hosts(request, jobs.measured.topologies)
    hosts = with_slots(names, jobs.measured.topologies, np=1, gpus=request.gpus)
    used = {host.name for host in hosts}
    for host in facts:
        if host not in used:
            remedy = "free some, or leave the host out"
            jobs.add_finding("warning", (host,), remedy, "none of its GPUs is free")
    planned = [(host,) for host in hosts if host.slots > 1] + ([tuple(hosts)] if len(hosts) > 1 else [])
    if not planned:
        remedy = "pass its slots, such as -H localhost:2"
        jobs.add_finding("error", tuple(facts), remedy, "one rank has no other to sum with")
    for number, job in enumerate(planned, start=1):
        where = job[0].name if len(job) == 1 else f"{len(job)} hosts"
        say(f"measuring {where} ({number} of {len(planned)})")
        jobs.measure(job)
    if request.traffic is not None and planned:
        size = max(part.gradient_bytes for part in request.traffic.parts)
        jobs.compare_sums(planned[-1], max(1, size // 4) * 4)  # whole float32 values
    findings = [*checked.findings, *jobs.findings, *slow_ones(jobs.measured)]
    return replace(checked, bandwidth=jobs.measured, findings=errors_first(findings))


@dataclass(kw_only=True)
class _Jobs:
    """The jobs of one check, and what they have found so far."""

    request: RunRequest
    facts: Mapping[str, HostFacts]
    environment: Mapping[str, str]
    log: bool  # NCCL's
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.measured = Bandwidth(topologies={name: own.topology for name, own in self.facts.items()})

    def add_finding(
        self, severity: Literal["error", "warning"], hosts: tuple[str, ...], remedy: str, why: str | None = None
    ) -> None:
        """Add that these hosts were not measured."""
        problem = "it was not measured" if why is None else f"it was not measured: {why}"
        self.findings.append(Finding(severity=severity, hosts=hosts, about="bandwidth", problem=problem, remedy=remedy))

    def measure(self, hosts: tuple[Host, ...]) -> None:
        """Start a job over these hosts, and add its results or its findings."""
        name, names = hosts[0].name if len(hosts) == 1 else "all", tuple(host.name for host in hosts)
        words = ["--pairs"] if self._is_on_gpus(hosts) or len(hosts) > 1 else []
        environment = BOTH_WAYS | self._named(name)
        environment = with_log(environment, Path.cwd()) if self.log else environment
        try:
            slots, report = self._run(hosts, words, environment, log=self.log)
        except _NotMeasuredError as error:
            self.add_finding("error", names, *error.args)
            return
        except LaunchError as error:
            self.findings.append(from_error(error, names, "bandwidth"))
            return
        totals, exchanges = from_report(report)
        if len(hosts) > 1:
            self.measured.over_all = totals
            self.measured.pairs = {(slots[a].host, slots[b].host): speeds for (a, b), speeds in exchanges.items()}
            return
        self.measured.hosts[name] = totals
        for (a, b), speeds in exchanges.items():
            gpu, other = slots[a].gpu, slots[b].gpu
            if gpu is not None and other is not None:
                self.measured.links.setdefault(name, {})[min(gpu, other), max(gpu, other)] = speeds

    def compare_sums(self, hosts: tuple[Host, ...], size: int) -> None:
        """Compare all-reduce algorithms at this size over all ranks of the hosts; those that fail are findings."""
        names = tuple(host.name for host in hosts)

        def measure(name: str, variables: Mapping[str, str], words: Sequence[str]) -> tuple[float, ...] | None:
            try:
                _, report = self._run(hosts, [*words, "--sizes", str(size)], {**self._named("sums"), **variables})
                return tuple(report["measured"][0]["times_s"])
            except _NotMeasuredError:
                remedy = "see what is printed above, or leave --measured out"
                self.add_finding("warning", names, remedy, f"sums by {name}")
            except LaunchError as error:
                self.findings.append(from_error(error, names, "bandwidth"))
            return None

        self.measured.sums = compare_sums(hosts, size, measure, on_gpus=self._is_on_gpus(hosts))

    def _run(
        self, hosts: tuple[Host, ...], words: Sequence[str], environment: Mapping[str, str], *, log: bool = False
    ) -> tuple[Sequence[RankSlot], Any]:
        """Run hvdtrain.bandwidth with these arguments over the hosts; return the ranks and its report.

        LaunchError if it cannot be started, _NotMeasuredError without a report. SystemExit after a signal.
        """
        options = ["--quiet", "--repeats", str(REPEATS), "--limit-s", f"{LIMIT_S:g}"]
        with scratch() as folder:
            file = folder / "bandwidth.json"
            wanted = replace(
                self.request,
                np=sum(host.slots for host in hosts),
                hosts=hosts,
                per_host=None,
                program=(sys.executable, "-P", "-m", "hvdtrain.bandwidth", *words, *options, "--json", str(file)),
                check=False,
                traffic=None,
            )
            own = {"MPIEXEC_TIMEOUT": str(round(JOB_S + LIMIT_S * len(hosts))), **environment}
            prepared = prepare(wanted, own, Path.cwd(), {host.name: self.facts[host.name] for host in hosts})
            result = self._run_logged(prepared) if log else run(prepared, out=STDERR)
            if result.stopped:
                sys.exit(result.status)
            if result.status:
                raise _NotMeasuredError("see above", result.why or f"its ranks ended with status {result.status}")
            try:
                return prepared.plan.slots, parse(read_text(file))
            except (OSError, ValueError):
                remedy = "start in a folder that all hosts share"
                raise _NotMeasuredError(remedy, "its ranks have left no report") from None

    def _run_logged(self, prepared: PreparedRun) -> RunResult:
        plan = prepared.plan
        result, log = run_logged(prepared, out=STDERR)
        names = ", ".join(dict.fromkeys(slot.host for slot in plan.slots))
        self.measured.nccl.append(f"{names}: {lines_of(log, prepared)[0].removeprefix('note: ')}")
        if log is not None:
            self.findings += unexpected_transport(log, plan.slots, plan.topologies)
        return result

    def _is_on_gpus(self, hosts: Sequence[Host]) -> bool:
        return self.request.gpus != "none" and bool(self.facts[hosts[0].name].topology.gpus)

    def _named(self, name: str) -> dict[str, str]:
        return {**self.environment, "HVDLAUNCH_JOB": f"{job_of(self.environment)}-{name}"}


class _NotMeasuredError(Exception):
    """A remedy, and why a job has left no report."""


def compare_sums(hosts: Sequence[Host], size: int, measure: Measure, *, on_gpus: bool) -> ComparedSums | None:
    """Compare sums of `size` bytes over all ranks of these hosts; None if the default cannot be measured."""
    known = ways(on_gpus=on_gpus, hosts=len(hosts))
    if len({host.slots for host in hosts}) > 1:  # it needs equally many ranks on each host
        known.pop(TWO_LEVEL, None)
    rounds_s: dict[str, list[tuple[float, ...]]] = {name: [] for name in known}
    running = list(known)
    for number in range(ROUNDS):
        for name in running if number % 2 == 0 else reversed(running):
            say(f"sums by {name} (round {number + 1} of {ROUNDS})")
            times_s = measure(name, known[name], ["--over", "two-level" if name == TWO_LEVEL else "ours"])
            if times_s is not None:
                rounds_s[name].append(times_s)
        if len(rounds_s[USUAL]) <= number:
            return None
        running = [name for name in running if len(rounds_s[name]) > number]
        medians = {name: statistics.median(rounds_s[name][0]) for name in running}
        running = [name for name in running if name == USUAL or medians[name] <= BEHIND * min(medians.values())]
    return ComparedSums(
        hosts=tuple(host.name for host in hosts),
        ranks=tuple(host.slots for host in hosts),
        on_gpus=on_gpus,
        bytes=size,
        ways=tuple(TimedWay(name=name, rounds_s=tuple(own)) for name, own in rounds_s.items() if own),
    )
