"""A run with NCCL's log of every rank, and a check of NCCL's behaviour against what the hosts allow."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch.errors import ProcessError
from launch.machine.show.table import link_word
from launch.machine.topology import Topology, position
from launch.placement.findings import Finding, errors_first
from launch.placement.slots import RankSlot
from launch.run.start.prepare import job_of
from launch.run.start.render import PreparedRun
from launch.run.supervise import rank_logs
from launch.run.supervise.run import RunResult, run
from launch.run.supervise.stops import GRACE_S
from launch.run.supervise.traces.nccl_log import NcclLog, new_folder, read_folder

FILES = "nccl.%h.%p.log"  # NCCL inserts host and process
SUBSYSTEMS = "INIT,GRAPH,ENV"  # GRAPH logs each rank's place in every ring
# NCCL's default on every CPU; across the CPU, NCCL may use memory instead (ncclTopoCheckP2p in src/graph/paths.cc).
DIRECT = ("NV", "PIX", "PXB")
MAX_NAMED = 16  # ranks of a ring


def with_log(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment for a run whose ranks write NCCL's log into logs/JOB of this folder."""
    job = job_of(environment)
    return {
        **environment,
        "HVDLAUNCH_JOB": job,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": environment.get("NCCL_DEBUG_SUBSYS", SUBSYSTEMS),
        "NCCL_DEBUG_FILE": str(folder / rank_logs.FOLDER / job / FILES),
    }


def run_logged(
    prepared: PreparedRun, *, grace_s: float = GRACE_S, out: int | None = None
) -> tuple[RunResult, NcclLog | None]:
    """Run, and return what NCCL has logged, None if nothing; `prepared` needs the environment of `with_log`."""
    folder = log_folder(prepared)
    try:
        new_folder(folder)
    except OSError as error:
        raise ProcessError(f"{folder} cannot be made: {error.strerror}") from error
    return run(prepared, grace_s=grace_s, out=out), read_folder(folder, max_ranks=len(prepared.plan.slots))


def lines_of(log: NcclLog | None, prepared: PreparedRun) -> list[str]:
    """Describe what NCCL did, and what was unexpected."""
    folder, plan = log_folder(prepared), prepared.plan
    if log is None:
        return [f"warning: NCCL has left no log in {folder}: it was not used, or the hosts do not share that folder"]
    wrong = unexpected_transport(log, plan.slots, plan.topologies)
    line = f"note: {summary(log, plan.slots)}{'' if wrong else ', as expected'}; its logs are in {folder}"
    return [line, *map(str, wrong)]


def log_folder(prepared: PreparedRun) -> Path:
    """Return the folder of the ranks' NCCL logs."""
    return Path(prepared.environment["NCCL_DEBUG_FILE"]).parent


def summary(log: NcclLog, slots: Sequence[RankSlot]) -> str:
    """Summarize NCCL's behaviour in one line."""
    known = {pair: way for pair, way in log.ways.items() if max(pair) < len(slots)}
    inside = {way for (a, b), way in known.items() if slots[a].host == slots[b].host}
    across = {way for (a, b), way in known.items() if slots[a].host != slots[b].host}
    parts = [f"{log.channels} channel{'' if log.channels == 1 else 's'}"] if log.channels else []
    parts += [f"{' and '.join(sorted(inside))} on a host"] if inside else []
    parts += [f"{' and '.join(sorted(across))} between hosts"] if across else []
    parts += [f"ring {_ring(log.rings[0])}"] if log.rings else []
    return f"NCCL {log.version or 'of unknown version'}: {', '.join(parts) or 'no channel logged'}"


def unexpected_transport(log: NcclLog, slots: Sequence[RankSlot], topologies: Mapping[str, Topology]) -> list[Finding]:
    """Return transports that differ from what the hosts allow, and NCCL's own warnings."""
    hosts = [slot.host for slot in slots]
    wrong = []  # host, problem, remedy
    for rank, file, text, count in log.warnings:
        times = f" {count} times, first" if count > 1 else ""
        wrong.append((hosts[rank], f"NCCL warned{times} on rank {rank}: {text}", f"see {file}"))
    if log.missing:
        who = ", ".join(map(str, log.missing[:4])) + (" and more" if len(log.missing) > 4 else "")
        wrong.append((hosts[log.missing[0]], f"no NCCL log from rank {who}", "start in a folder that all hosts share"))
    for (a, b), way in log.ways.items():
        if max(a, b) < len(slots):
            wrong += _wrong_way(slots[min(a, b)], slots[max(a, b)], way, topologies)
    return list(
        errors_first(
            Finding(severity="warning", hosts=(host,), about="NCCL", problem=problem, remedy=remedy)
            for host, problem, remedy in dict.fromkeys(wrong)
        )
    )


def _wrong_way(
    a: RankSlot, b: RankSlot, way: str, topologies: Mapping[str, Topology]
) -> Iterator[tuple[str, str, str]]:
    """Yield the host, the problem and the remedy of an unexpected transport between two ranks."""
    topology = topologies[a.host]
    if a.host != b.host:
        adapters = [f"{nic.name}:{port.number}" for nic in topology.nics for port in nic.ports if port.active]
        usable = [name for name in adapters if name not in a.unfit_ports]
        if way == "NET/Socket" and usable:
            yield (
                a.host,
                f"it talks to {b.host} over TCP though {usable[0]} is up",
                "see ibv_devinfo and ulimit -l there, NCCL_IB_DISABLE and, in a container, its devices",
            )
    elif a.gpu is not None and b.gpu is not None:
        link = topology.links[position(topology, a.gpu)][position(topology, b.gpu)]
        if link.p2p and link.kind in DIRECT and not way.startswith("P2P"):
            gpus = f"GPUs {min(a.gpu, b.gpu)} and {max(a.gpu, b.gpu)} ({link_word(link)})"
            remedy = "see NCCL_P2P_DISABLE, IOMMU and ACS, and in a container --ipc=host"
            yield a.host, f"{gpus} talk over {way}, not P2P", remedy
        elif way == "NET/Socket":
            yield a.host, "its own GPUs talk over TCP", "see NCCL_SHM_DISABLE and the size of /dev/shm"


def _ring(ranks: Sequence[int]) -> str:
    return "-".join([*map(str, ranks[:MAX_NAMED]), *(["..."] if len(ranks) > MAX_NAMED else [])])
