"""Pure: a request and the facts about its hosts -> which rank runs where."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from launch.errors import CommandError, HostError, TopologyError
from launch.hosts.host import MAX_SLOTS, Host, shown
from launch.hosts.host_facts import HostFacts
from launch.machine.mpi import from_environment
from launch.machine.topology import Topology
from launch.placement import network
from launch.placement.allreduce import chosen
from launch.placement.findings import Finding, common_findings, named
from launch.placement.measured import with_measured
from launch.placement.remarks import crowded, gpu_remarks, left_out
from launch.placement.slots import RankSlot, counts_cores, place, ranks_per_host, with_slots
from launch.run.start.environment import exported, inherited, note_left_behind
from launch.run.start.facts import Facts
from launch.run.start.plan import Plan
from launch.run.start.request import Attempt, RunRequest, note_of_step


def decide(
    request: RunRequest,
    facts: Facts,
    shared: network.SharedNetwork | None,
    environment: Mapping[str, str],
    *,
    job: str,
) -> Plan:
    """Place the ranks, choose networks and variables; LaunchError if the run cannot be started as requested.

    `shared` is the network of the hosts; None on one host.
    """
    hosts, ranks = allot(request, facts)
    topologies, unmeasured = measured_topologies(request, facts.answers)
    for host in ranks:
        if host in unmeasured:
            raise unmeasured[host]
    used = {host: facts.answers[host] for host in ranks}
    settings: Mapping[str, str] = {}  # of the fastest all-reduce in --measured
    notes = []
    if request.measured.sums is not None:
        on_gpus = request.gpus != "none" and any(answer.topology.gpus for answer in used.values())
        settings, note = chosen(request.measured.sums, ranks, environment, on_gpus=on_gpus)
        notes = [note]
    environment = {**environment, **settings}
    require_program(request, facts, used)
    exports = exported(environment, request.exports)
    findings: tuple[Finding, ...] = ()
    if shared and request.check:
        software = request.apptainer is None
        findings = common_findings(used, shared=shared, ranks=ranks, exports=exports, software=software)
    refuse_errors(findings)
    slots = place(
        hosts,
        topologies,
        np=sum(ranks.values()),
        gpus=request.gpus,
        binding=request.binding,
        ranks_per_replica=request.ranks_per_replica,
        interfaces={host: own.name for host, own in shared.interfaces.items()} if shared else {},
        set_by_user=[name for name in exports if name in environment],
        traffic=request.traffic,
    )
    launcher, program = facts.launcher, request.program
    if request.nsys:
        program = under_nsys(program, launcher.rank_variable)
    if request.apptainer is not None:
        program = in_apptainer(program, request.apptainer)
    notes = [
        *remarks_on(request, facts.hosts or own_hosts(request, topologies), slots, topologies),
        *map(str, findings),
        *notes,
    ]
    if request.hosts is None and (step := note_of_step(environment)):
        notes.append(step)
    if shared and (behind := note_left_behind(environment, exports)):
        notes.append(behind)
    if shared and shared.tried:
        notes.append(f"note: networks tried between the hosts: {network.describe(shared.tried)}")
    if request.network is not None and shared is None:
        why = "one host needs no network" if len(used) == 1 else "with --topology no host is asked"
        notes.append(f"note: --network {shown(request.network)} is not used: {why}")
    meeting = {**rendezvous(slots[0].host, used, shared), **as_torchrun(request.attempt, environment, job)}
    plan = Plan(
        request=request,
        slots=slots,
        hostnames={host: answer.hostname for host, answer in used.items()},
        local=facts.local & used.keys(),
        program=program,
        executable=facts.programs.get(program[0]),
        job=job,
        network=shared.name if shared else None,
        daemon_networks=daemon_networks(shared.name, used, facts) if shared and launcher.has_daemons else None,
        rendezvous={name: value for name, value in meeting.items() if name not in exports},
        exports=exports,
        mca=(*from_environment(environment), *request.parameters),
        environment=inherited(environment, exports, local=shared is None),
        remarks=(),
        apart=frozenset(host for host, own in used.items() if own.condition and own.condition.sees_token is False),
        settings=settings,
        topologies={host: topologies[host] for host in used},
    )
    kept = [f"note: {parameter} is kept" for parameter in launcher.kept(plan) if parameter.in_file]
    return replace(plan, remarks=(*kept, *notes))


def allot(request: RunRequest, facts: Facts) -> tuple[tuple[Host, ...], dict[str, int]]:
    """Return the hosts with their slots, and the number of ranks of each host that has some."""
    require_distinct(facts.answers)
    topologies = {host: answer.topology for host, answer in facts.answers.items()}
    hosts = with_slots(
        facts.hosts or own_hosts(request, topologies),
        topologies,
        np=request.np,
        gpus=request.gpus,
        ranks_per_replica=request.ranks_per_replica,
        listed=facts.hosts is not None,
    )
    np = sum(host.slots for host in hosts) if request.np is None else request.np
    return hosts, ranks_per_host(hosts, np, request.ranks_per_replica)


def measured_topologies(
    request: RunRequest, answers: Mapping[str, HostFacts]
) -> tuple[dict[str, Topology], dict[str, TopologyError]]:
    """Apply --measured to the topology of each host; return an error for each host that it does not cover."""
    topologies = {host: answer.topology for host, answer in answers.items()}
    unmeasured = {}
    if request.measured.links and request.gpus != "none":
        for host, own in topologies.items():
            try:
                topologies[host] = with_measured(own, request.measured.links, host)
            except TopologyError as error:
                unmeasured[host] = error
    return topologies, unmeasured


def remarks_on(
    request: RunRequest, listed: Iterable[Host], slots: Sequence[RankSlot], topologies: Mapping[str, Topology]
) -> list[str]:
    """Return notes about the GPUs or their absence, and about too many ranks."""
    too_many = crowded(slots, topologies, request.ranks_per_replica or 1)
    remarks = [] if too_many is None else [too_many]
    if slots[0].gpu is None:
        why = "--gpus none" if request.gpus == "none" else "no GPU found"
        return [f"note: {why}, running on CPU", *remarks]
    remarks += gpu_remarks(slots, topologies)
    if request.np is None and request.gpus == "all":
        known = {host.name: topologies[host.name] for host in listed}
        cores = [host.name for host in listed if counts_cores(host, known[host.name])]
        remarks += left_out({host.name: known[host.name] for host in listed if not host.counted or host.name in cores})
        if cores:
            remarks.append(f"note: {named(cores)}: more slots than GPUs, one rank for each free GPU")
    return remarks


def require_distinct(answers: Mapping[str, HostFacts]) -> None:
    """Raise HostError if two names refer to the same host."""
    first: dict[str, str] = {}
    for host, answer in answers.items():
        name = answer.hostname
        if name is not None and (other := first.setdefault(name, host)) != host:
            raise HostError(f"{other} and {host} are the same host, {name}: name it once, with all its slots")


def own_hosts(request: RunRequest, names: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts if none are listed: this one, or those of saved topologies; on CPUs each takes all ranks."""
    slots = request.per_host or min(1 if request.np is None else request.np, MAX_SLOTS)
    counted = request.per_host is not None
    return tuple(Host(name=name, slots=slots, counted=counted, unit="rank" if counted else "slot") for name in names)


def require_program(request: RunRequest, facts: Facts, used: Mapping[str, HostFacts]) -> None:
    """Raise CommandError if this host is part of the run and lacks the program, or what it runs under."""
    if not facts.local & used.keys():
        if request.apptainer is not None and "apptainer" not in facts.programs:
            raise CommandError(
                f"--apptainer {request.apptainer}: no apptainer on this machine to look into it: install it"
            )
        return
    wrong = []
    program = "apptainer" if request.apptainer is not None else request.program[0]
    if program not in facts.programs:
        remedy = "install it, or leave --apptainer out" if request.apptainer else "correct what stands after --"
        wrong.append(f"no program {program!r} on this host: {remedy}")
    if request.nsys and not request.apptainer and "nsys" not in facts.programs:
        wrong.append("--nsys: no nsys on this host: put the bin folder of Nsight Systems in PATH, or leave --nsys out")
    if wrong:
        raise CommandError("; ".join(wrong))


def refuse_errors(findings: Sequence[Finding]) -> None:
    """Raise HostError if one of the findings is an error, with all findings as details."""
    wrong = [finding for finding in findings if finding.severity == "error"]
    if wrong:
        hosts = named(list(dict.fromkeys(host for finding in wrong for host in finding.hosts)))
        raise HostError(
            f"this run would fail because of {hosts}: fix what follows, or pass --no-check to start anyway",
            [str(finding) for finding in findings],
        )


def daemon_networks(shared: str, used: Mapping[str, HostFacts], facts: Facts) -> str:
    """Return the networks between mpirun and its daemons: a login node may reach the hosts over another network."""
    if facts.local & used.keys():
        return shared
    reached = next((host for host, answer in used.items() if answer.address), None)
    if reached is None:
        if network.name_on(facts.interfaces, shared):
            return shared
        raise HostError(
            f"{', '.join(used)} are reached over IPv6, mpirun needs IPv4: add `AddressFamily inet` to ~/.ssh/config"
        )
    our_address = facts.own_addresses.get(reached)
    toward = [interface for interface in facts.interfaces if str(network.address_of(interface)) == our_address]
    if our_address is None or not toward:
        raise HostError(
            f"{used[reached].address} can be reached by ssh but not directly, and mpirun must: "
            f"start on a host of {shared}"
        )
    return shared if network.name_on(toward, shared) else f"{shared},{network.network_of(toward, our_address)}"


def as_torchrun(attempt: Attempt, environment: Mapping[str, str], job: str) -> dict[str, str]:
    """Return the other variables that torchrun gives to all ranks: programs find out by them how they were started."""
    return {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 listens at MASTER_PORT, not the launcher
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def rendezvous(first: str, used: Mapping[str, HostFacts], shared: network.SharedNetwork | None) -> dict[str, str]:
    """Return where rank 0, on the `first` host, listens for a program's other ranks; empty if not probed."""
    if used[first].port is None:
        return {}
    address = network.address_of(shared.interfaces[first]) if shared else "127.0.0.1"
    return {"MASTER_ADDR": str(address), "MASTER_PORT": str(used[first].port)}


def under_nsys(program: Sequence[str], rank_variable: str) -> tuple[str, ...]:
    """Run the program under Nsight Systems, with a report per rank: GPU, ranges, waits and MPI, no CPU samples.

    The reports are relative to the run's working folder, on each host.
    """
    return (
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt,mpi",
        "--mpi-impl=openmpi",
        "--sample=none",
        "--cpuctxsw=none",
        f"--output=%q{{HVDLAUNCH_JOB}}-rank-%q{{{rank_variable}}}",
        "--force-overwrite=true",
        *program,
    )


def in_apptainer(program: Sequence[str], image: str) -> tuple[str, ...]:
    """Run the program in an Apptainer image, with the host's GPU driver."""
    return ("apptainer", "exec", "--nv", image, *program)
