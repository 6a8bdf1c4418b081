"""Bandwidths measured by hvdtrain.bandwidth: one job on each host with several ranks, then one over all hosts.

The job over all hosts measures every two of them, in rounds in which each host is in at most one pair: the 28 pairs of
8 hosts need one start of ranks and 7 rounds. Jobs run one at a time, so that they do not compete for the network or
cores. With --traffic a job for each all-reduce algorithm follows (launch.study.sums), at the gradient bytes of that
run.
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from launch.documents import parse
from launch.errors import LaunchError
from launch.files import read_text
from launch.hosts.host import Host
from launch.output import say
from launch.placement.allreduce import ComparedSums
from launch.placement.findings import Finding, errors_first, from_error
from launch.placement.slots import with_slots
from launch.probe.host_facts import HostFacts
from launch.start.decide import own_hosts
from launch.start.prepare import job_of, prepare
from launch.start.render import PreparedRun
from launch.start.request import RunRequest, listed
from launch.study import sums
from launch.study.check import STDERR, Checked
from launch.study.links import Bandwidth, Speeds, from_report, slow_ones
from launch.supervise.nccl import lines_of, run_logged, unexpected_transport, with_log
from launch.supervise.run import run

REPEATS = 5
# On slow links Open MPI over TCP would often send the two ways of an exchange one after the other: half the speed.
BOTH_WAYS = {"OMPI_MCA_btl_tcp_flags": "1"}
LIMIT_S = 5.0  # for all sizes of one sum, or of one pair: on a slow network the largest sizes are skipped
JOB_S = 300  # maximum, in addition to LIMIT_S for each host


def with_bandwidth(
    checked: Checked, request: RunRequest, environment: Mapping[str, str], *, nccl_debug: bool
) -> Checked:
    """Add measurements between ranks on the hosts, and slow results as findings; unchanged if a host has an error.

    A job that cannot be measured is a finding. SystemExit if a signal ends a job.
    """
    facts = {name: own for name, own in checked.hosts.items() if own is not None}
    topologies = {name: own.topology for name, own in facts.items()}
    if checked.status:
        skipped = _finding("warning", tuple(facts), "it was not measured", "fix the errors first")
        return replace(checked, findings=errors_first([*checked.findings, skipped]))
    if checked.shared is not None:
        request = replace(request, network=checked.shared.name)  # tried by the check
    names = listed(request, environment) or own_hosts(request, topologies)
    hosts = with_slots(names, topologies, np=1, gpus=request.gpus)
    findings = [
        _finding(
            "warning", (host,), "it was not measured: none of its GPUs is free", "free some, or leave the host out"
        )
        for host in topologies
        if host not in {used.name for used in hosts}
    ]
    if not (planned := jobs(hosts)):
        remedy = "pass its slots, such as -H localhost:2"
        findings.append(
            _finding("error", tuple(facts), "it was not measured: one rank has no other to sum with", remedy)
        )
    name = job_of(environment)
    measured = Bandwidth(hosts={}, pairs={}, links={}, over_all=(), topologies=topologies)
    for number, job in enumerate(planned, start=1):
        where = job[0].name if len(job) == 1 else f"{len(job)} hosts"
        say(f"measuring {where} ({number} of {len(planned)})")
        own = {**environment, "HVDLAUNCH_JOB": f"{name}-{job[0].name if len(job) == 1 else 'all'}"}
        try:
            measured, wrong = _with_job(measured, job, request=request, facts=facts, environment=own, log=nccl_debug)
        except LaunchError as error:
            wrong = [from_error(error, [host.name for host in job], "bandwidth")]
        findings += wrong
    if request.traffic is not None and planned:
        size = max(part.gradient_bytes for part in request.traffic.parts)
        size = max(1, size // 4) * 4  # whole float32 values
        compared, wrong = _compared(planned[-1], size, request=request, facts=facts, environment=environment)
        measured, findings = replace(measured, sums=compared), findings + wrong
    return replace(
        checked, bandwidth=measured, findings=errors_first([*checked.findings, *findings, *slow_ones(measured)])
    )


def jobs(hosts: Sequence[Host]) -> list[tuple[Host, ...]]:
    """Return the hosts of each job: each host with several ranks by itself, and all of them."""
    return [(host,) for host in hosts if host.slots > 1] + ([tuple(hosts)] if len(hosts) > 1 else [])


def _with_job(
    measured: Bandwidth,
    hosts: tuple[Host, ...],
    *,
    request: RunRequest,
    facts: Mapping[str, HostFacts],
    environment: Mapping[str, str],
    log: bool,
) -> tuple[Bandwidth, list[Finding]]:
    """Add the results of the job over these hosts; return them with the findings."""
    words = ["--pairs"] if _on_gpus(request, facts, hosts) or len(hosts) > 1 else []
    own = BOTH_WAYS | (with_log(environment, Path.cwd()) if log else dict(environment))
    with _job(hosts, words, request=request, facts=facts, environment=own) as (prepared, file):
        return _started(measured, prepared, file, log=log)


def _compared(
    hosts: tuple[Host, ...],
    size: int,
    *,
    request: RunRequest,
    facts: Mapping[str, HostFacts],
    environment: Mapping[str, str],
) -> tuple[ComparedSums | None, list[Finding]]:
    """Compare all-reduce algorithms at this size over all ranks of the hosts; return also those that failed."""
    findings, job, names = [], f"{job_of(environment)}-sums", tuple(host.name for host in hosts)

    def measure(name: str, variables: Mapping[str, str], words: Sequence[str]) -> tuple[float, ...] | None:
        options = [*words, "--sizes", str(size)]
        own = {**environment, **variables, "HVDLAUNCH_JOB": job}
        try:
            with _job(hosts, options, request=request, facts=facts, environment=own) as (prepared, file):
                result = run(prepared, out=STDERR)
                if result.stopped:
                    sys.exit(result.status)
                return tuple(float(seconds) for seconds in parse(read_text(file))["measured"][0]["times_s"])
        except LaunchError as error:
            findings.append(from_error(error, names, "bandwidth"))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            problem = f"sums by {name} were not measured"
            findings.append(_finding("warning", names, problem, "see what is printed above, or leave --traffic out"))
        return None

    on_gpus = _on_gpus(request, facts, hosts)
    return sums.compare(hosts, size, measure, on_gpus=on_gpus), findings


def _on_gpus(request: RunRequest, facts: Mapping[str, HostFacts], hosts: Sequence[Host]) -> bool:
    return request.gpus != "none" and bool(facts[hosts[0].name].topology.gpus)


@contextlib.contextmanager
def _job(
    hosts: tuple[Host, ...],
    words: Sequence[str],
    *,
    request: RunRequest,
    facts: Mapping[str, HostFacts],
    environment: Mapping[str, str],
) -> Iterator[tuple[PreparedRun, Path]]:
    """Prepare a job of hvdtrain.bandwidth with these arguments over the hosts, and the file for its report."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hvdlaunch-", dir=Path.cwd()))
    except OSError as error:
        raise LaunchError(f"no folder can be made in {Path.cwd()} for what is measured: {error.strerror}") from error
    try:
        file = folder / "bandwidth.json"
        wanted = replace(
            request,
            np=sum(host.slots for host in hosts),
            hosts=hosts,
            per_host=None,
            program=program(file, words),
            check=False,
            traffic=None,
        )
        own = {"MPIEXEC_TIMEOUT": str(round(JOB_S + LIMIT_S * len(hosts))), **environment}
        yield prepare(wanted, own, Path.cwd(), {host.name: facts[host.name] for host in hosts}), file
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def program(file: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of the ranks, which writes its report to the file."""
    options = ["--quiet", "--repeats", str(REPEATS), "--limit-s", f"{LIMIT_S:g}", "--json", str(file)]
    return (sys.executable, "-P", "-m", "hvdtrain.bandwidth", *words, *options)


def _started(measured: Bandwidth, prepared: PreparedRun, file: Path, *, log: bool) -> tuple[Bandwidth, list[Finding]]:
    """Run a job, and add its results; return them with the findings."""
    slots = prepared.plan.slots
    names = tuple(dict.fromkeys(slot.host for slot in slots))
    wrong: list[Finding] = []
    if log:
        result, nccl_log = run_logged(prepared, out=STDERR)
        line = lines_of(nccl_log, prepared)[0].removeprefix("note: ")
        measured = replace(measured, nccl=(*measured.nccl, f"{', '.join(names)}: {line}"))
        wrong += unexpected_transport(nccl_log, slots, prepared.plan.topologies) if nccl_log is not None else []
    else:
        result = run(prepared, out=STDERR)
    if result.stopped:
        sys.exit(result.status)
    try:
        if result.status:
            raise ValueError(result.why or f"its ranks ended with status {result.status}")
        totals, exchanges = from_report(parse(read_text(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error) if result.status else "its ranks have left no report"
        remedy = "see above" if result.status else "start in a folder that all hosts share"
        return measured, [
            *wrong,
            Finding(
                severity="error", hosts=names, about="bandwidth", problem=f"it was not measured: {why}", remedy=remedy
            ),
        ]
    if len(names) > 1:
        pairs = {(slots[a].host, slots[b].host): speeds for (a, b), speeds in exchanges.items()}
        return replace(measured, pairs=pairs, over_all=totals), wrong
    links: dict[tuple[int, int], Speeds] = {}
    for (a, b), speeds in exchanges.items():
        gpu, other = slots[a].gpu, slots[b].gpu
        if gpu is not None and other is not None:
            links[min(gpu, other), max(gpu, other)] = speeds
    return replace(
        measured,
        hosts={**measured.hosts, names[0]: totals},
        links={**measured.links, names[0]: links} if links else measured.links,
    ), wrong


def _finding(severity: Literal["error", "warning"], hosts: tuple[str, ...], problem: str, remedy: str) -> Finding:
    return Finding(severity=severity, hosts=hosts, about="bandwidth", problem=problem, remedy=remedy)
