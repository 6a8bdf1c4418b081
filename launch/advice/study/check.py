"""Checks hosts for problems before a run costs money: facts, then mpirun's daemon on each, then their speeds."""

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.advice.study.links import Bandwidth, bandwidth_json, bandwidth_table
from launch.advice.study.speed import NO_SPEEDS, Speeds, measure_speeds
from launch.errors import LaunchError, harmless
from launch.hosts.host import Host
from launch.hosts.host_facts import HostFacts, other_version, version
from launch.hosts.probe import is_local, other_mpi, probe_hosts
from launch.hosts.ssh import SSH
from launch.machine.condition import SHM, Condition, Folder, open_inspection
from launch.machine.mpi import Mpi
from launch.machine.show.table import aligned
from launch.machine.topology import Topology
from launch.placement.findings import (
    MISSING,
    SEVERITIES,
    Finding,
    common_findings,
    errors_first,
    folder_findings,
    from_error,
    named,
    project,
    versions,
)
from launch.placement.gpu_findings import gpu_findings, links, training_findings
from launch.placement.network import SharedNetwork, describe
from launch.placement.slots import counts_cores
from launch.run.start.decide import require_distinct
from launch.run.start.environment import exported
from launch.run.start.facts import own_addresses
from launch.run.start.launchers.choose import launcher_of
from launch.run.start.prepare import prepare, shared_network
from launch.run.start.request import NOTHING_MEASURED, RunRequest, listed, with_named
from launch.run.start.request import check as check_request
from launch.run.supervise.run import run

STDERR = 2  # standard output is for the table or JSON
START_S = 60  # until mpirun gives up
CONNECT_S = 4  # a silent host must not delay the others


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The facts of hosts, and their problems."""

    hosts: Mapping[str, HostFacts | None]  # None: it did not respond
    shared: SharedNetwork | None  # the network that the hosts share; None on one host, or if they share none
    findings: tuple[Finding, ...]
    speeds: Speeds = NO_SPEEDS
    bandwidth: Bandwidth | None = None  # if measured

    @property
    def status(self) -> int:
        """1 if there is an error, else 0."""
        return int(any(finding.severity == "error" for finding in self.findings))


def check(
    request: RunRequest, environment: Mapping[str, str], folder: Path, *, runs_dir: Path, data_dir: Path
) -> Checked:
    """Probe and check all hosts of the request; LaunchError for a request that is invalid for any hosts.

    The check also works if there is no mpirun on this host. The two folders are relative to `folder`, from which a run
    would start.
    """
    exports = exported(environment, request.exports)
    hosts = with_named(listed(request, environment) or (Host(name="localhost", slots=1, counted=False),), request.gpus)
    check_request(request, hosts, environment)
    names, ssh = [host.name for host in hosts], request.ssh
    if ssh.agent == SSH.agent:  # of the user's own options the first counts
        ssh = replace(ssh, options=(*ssh.options, f"ConnectTimeout={CONNECT_S}"))
    mpirun = launcher_of(request).mpi
    with open_inspection(folder / runs_dir, folder / data_dir) as inspection:
        answers = probe_hosts(
            names,
            ssh=ssh,
            mpirun=mpirun,
            python=sys.executable,
            folder=str(folder),
            gpus=request.gpus != "none",
            inspection=inspection,
            any_version=True,
        )
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, HostFacts)}
    slots = {
        host.name: host.slots
        for host in hosts
        if host.counted and not (host.name in facts and counts_cores(host, facts[host.name].topology))
    }
    findings = [
        from_error(answer, [host], "reached") for host, answer in answers.items() if isinstance(answer, LaunchError)
    ]
    shared = None
    try:
        require_distinct(facts)
        local, toward = frozenset(host for host in facts if is_local(host)), own_addresses(facts)
        shared = shared_network(facts, request, environment, folder, local=local, own_addresses=toward)
    except LaunchError as error:
        findings.append(from_error(error, list(facts), "network"))
    findings += evaluate_findings(request, facts, mpirun=mpirun, shared=shared, slots=slots, exports=exports)
    if facts and not any(finding.severity == "error" for finding in findings):
        findings += start_daemons(request, facts, environment, folder, network=shared.name if shared else None)
    return Checked(hosts={host: facts.get(host) for host in names}, shared=shared, findings=errors_first(findings))


def with_speeds(checked: Checked, request: RunRequest, folder: Path) -> Checked:
    """Add the speeds of the hosts, and slow ones as findings; unchanged if a host has an error."""
    if checked.status:
        return checked
    facts = {host: own for host, own in checked.hosts.items() if own is not None}
    speeds, findings = measure_speeds(request, facts, folder)
    return replace(checked, speeds=speeds, findings=errors_first([*checked.findings, *findings]))


def evaluate_findings(
    request: RunRequest,
    facts: Mapping[str, HostFacts],
    *,
    mpirun: Mpi,
    shared: SharedNetwork | None,
    slots: Mapping[str, int],
    exports: Collection[str],
) -> list[Finding]:
    """Return the problems of the hosts that have responded."""
    in_image = request.apptainer is not None
    ranks = {host: slots.get(host) or max(1, len(own.topology.gpus)) for host, own in facts.items()}
    findings = [
        *common_findings(facts, shared=shared, ranks=ranks, exports=exports, software=not in_image),
        *folder_findings(facts),
        *(() if in_image else training_findings(facts)),
        *(gpu_findings(facts, slots, exports, request.gpus) if request.gpus != "none" else ()),
    ]
    for host, own in facts.items():
        if (other := other_mpi(own, mpirun)) is not None:
            findings.append(from_error(other, [host], "MPI"))
        differs = any(finding.about == "project" and host in finding.hosts for finding in findings)
        if own.other_version is not None and not differs:  # all hosts may have a different version than this machine
            findings.append(from_error(other_version(host, own.other_version, version()), [host], "project"))
    return findings


def start_daemons(
    request: RunRequest,
    facts: Mapping[str, HostFacts],
    environment: Mapping[str, str],
    folder: Path,
    *,
    network: str | None,
) -> list[Finding]:
    """Start mpirun's daemons on several hosts as a run would, and return what it obeys and why it fails.

    SystemExit if a signal ends it.
    """
    names = tuple(facts)
    job = replace(
        request,
        np=len(names),
        per_host=None,
        program=("true",),
        hosts=tuple(Host(name=name, slots=1) for name in names),
        gpus="none",
        binding="none",
        ranks_per_replica=None,
        apptainer=None,
        network=network,
        exports=(),
        check=False,
        measured=NOTHING_MEASURED,
        traffic=None,
    )
    try:
        prepared = prepare(job, {"MPIEXEC_TIMEOUT": str(START_S), **environment}, folder, facts)
        kept = [parameter for parameter in prepared.launcher.kept(prepared.plan) if parameter.in_file]
        words = prepared.argv[: prepared.argv.index(prepared.launcher.python)]  # without bind and its logs
        result = run(replace(prepared, argv=[*words, *job.program]), out=STDERR) if prepared.plan.network else None
    except LaunchError as error:
        return [from_error(error, names, "daemons")]
    if result is not None and result.stopped:
        sys.exit(result.status)
    remedy = "take it out if hvdlaunch is to choose"
    findings = [
        Finding(severity="note", hosts=names, about="Open MPI", problem=f"{parameter} is kept", remedy=remedy)
        for parameter in kept
    ]
    if result is not None and result.status:
        problem = f"{prepared.launcher.mpi.path} does not start there: {result.why or f'status {result.status}'}"
        remedy = "correct what is printed above, or leave a host out"
        findings.append(Finding(severity="error", hosts=names, about="daemons", problem=problem, remedy=remedy))
    return findings


def to_json(checked: Checked) -> str:
    """Return all facts of the hosts, and the findings, as JSON."""
    document: dict[str, Any] = {
        "hosts": {host: None if own is None else asdict(own) for host, own in checked.hosts.items()},
        "network": None if checked.shared is None else checked.shared.name,
        **({"networks_tried": dict(checked.shared.tried)} if checked.shared and checked.shared.tried else {}),
        **({"speeds": asdict(checked.speeds)} if checked.speeds.hosts else {}),
        "findings": [asdict(finding) for finding in checked.findings],
        **({} if checked.bandwidth is None else {"bandwidth": bandwidth_json(checked.bandwidth)}),
    }
    return json.dumps(document, indent=1)


def text(checked: Checked) -> str:
    """Format a table of all facts, with a line for each value and its hosts; then the findings."""
    facts = {host: _facts_of(host, own, checked.shared) for host, own in checked.hosts.items()}
    rows = [["fact", "value", "hosts"]]
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        values: dict[str, list[str]] = {}
        for host, own in facts.items():
            if name in own:
                values.setdefault(own[name], []).append(host)
        for number, (value, hosts) in enumerate(values.items()):
            rows.append([name if number == 0 else "", value, "all" if len(hosts) == len(facts) > 1 else named(hosts)])
    counts = {severity: sum(finding.severity == severity for finding in checked.findings) for severity in SEVERITIES}
    totals = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items() if count)
    where = "1 host" if len(facts) == 1 else f"{len(facts)} hosts"
    return "\n".join(
        [
            aligned(rows),
            "",
            *([*checked.speeds.lines(), ""] if checked.speeds.hosts else []),
            *([] if checked.bandwidth is None else [bandwidth_table(checked.bandwidth), ""]),
            *(harmless(str(finding)) for finding in checked.findings),
            f"{where}: {totals or 'nothing is wrong'}",
        ]
    )


def _facts_of(host: str, own: HostFacts | None, shared: SharedNetwork | None) -> dict[str, str]:
    if own is None:
        return {"reached": "no"}
    facts = {"reached": "yes", "MPI": str(own.mpi or MISSING)}
    if own.condition:
        software = own.condition.software
        built = {None: MISSING, True: "yes", False: "no"}[software.horovod_has_nccl]
        facts |= {**versions(software), "Horovod with NCCL": built, "project": project(software)}
    facts |= _gpus_of(own.topology)
    met = shared.interfaces.get(host) if shared else None
    if shared and met:
        facts["network"] = shared.name
        facts["interface"] = f"{met.name}, {met.speed_mbps or 'unknown'} Mb/s, MTU {met.mtu or 'unknown'}"
        if shared.tried:
            facts["networks tried"] = describe(shared.tried)
    return facts | (_limits_of(own.condition) if own.condition else {})


def _gpus_of(topology: Topology) -> dict[str, str]:
    if not topology.gpus:
        return {"GPUs": MISSING}
    models = " and ".join(sorted({gpu.name or "unknown" for gpu in topology.gpus}))
    wrong = sum(bool(gpu.drawbacks) or (gpu.unusable or "").startswith("unhealthy") for gpu in topology.gpus)
    facts = {
        "GPUs": f"{topology.free} of {len(topology.gpus)} free, {models}",
        "GPU health": f"{wrong} slowed or ill" if wrong else "good",
        "between GPUs": links(topology),
    }
    if topology.nics:
        ports = [port.active for nic in topology.nics for port in nic.ports]
        facts["adapters"] = f"{len(topology.nics)}, {sum(ports)} of {len(ports)} ports up"
    return facts


def _limits_of(condition: Condition) -> dict[str, str]:
    locked, shm = condition.locked_memory_mib, condition.shm_free_mib
    runs, data = map(_folder, condition.folders)
    return {
        "locked memory": "no limit" if locked is None else f"{locked} MiB",
        SHM: MISSING if shm is None else f"{_gib(shm)} free",
        "run folder": runs,
        "data folder": data,
        "run folder shared": {None: "unknown", True: "yes", False: "no"}[condition.sees_token],
        "settings of its own": ", ".join(f"{setting.name}={setting.value}" for setting in condition.settings)
        or MISSING,
    }


def _folder(folder: Folder) -> str:
    storage = f", {folder.file_system}" if folder.file_system else ""
    return f"{folder.path}{'' if folder.there else ' (not there)'}, {_gib(folder.free_mib)} free{storage}"


def _gib(mib: int | None) -> str:
    return "unknown" if mib is None else f"{mib / 1024:.1f} GiB" if mib < 10 << 10 else f"{mib >> 10} GiB"
