"""Pure: checks several hosts before a run -> errors and warnings, each with a remedy.

Every run on several hosts makes these checks; launch.placement.gpu_findings has those of `hvdlaunch check` only.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from launch.errors import LaunchError
from launch.hosts.host_facts import HostFacts
from launch.machine.condition import SHM, Condition
from launch.machine.software import Software
from launch.placement.network import SharedNetwork

SEVERITIES = ("error", "warning", "note")
MISSING = "none"
NOT_SET = "not set"
MAX_NAMED = 8  # hosts in one line
SHM_MIB_PER_RANK = 64  # Docker's default is 64 for all ranks together
LOCKED_MIB = 1024  # InfiniBand registers its buffers in locked memory
FREE_MIB = 5 << 10  # enough for a few checkpoints, or a small data set
SET_BY_PLAN = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "HOROVOD_GLOO_IFACE"}  # differ from host to host
TCP_ALONE = "NCCL_IB_DISABLE"
SETUP = "run `make setup` there, in a checkout of the same commit"
SAME = "install the same version there"  # if hvdtrain is not installed
REMEDIES = {  # by the name of a version that must be equal on all hosts
    "Python": "install Python {usual} there and run `make setup` with it",
    **dict.fromkeys(("torch", "torchvision", "Horovod", "mpi4py", "numpy", "tokenizers", "NCCL", "CUDA"), SETUP),
    "driver": "install driver {usual} there, or leave the host out",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem of one or more hosts."""

    # error: a run would be rejected or fail; warning: it may fail or be slow; note: it may be slightly slower.
    severity: Literal["error", "warning", "note"]
    hosts: tuple[str, ...]
    about: str  # the fact, for example torch or MTU
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {named(self.hosts)}: {self.problem}. {self.remedy[:1].upper()}{self.remedy[1:]}."


def error(hosts: str | tuple[str, ...], about: str, problem: str, remedy: str) -> Finding:
    """Return the error about one host or several."""
    where = (hosts,) if isinstance(hosts, str) else hosts
    return Finding(severity="error", hosts=where, about=about, problem=problem, remedy=remedy)


def warning(hosts: str | tuple[str, ...], about: str, problem: str, remedy: str) -> Finding:
    """Return the warning about one host or several."""
    return replace(error(hosts, about, problem, remedy), severity="warning")


class Outlier(NamedTuple):
    """Hosts on which a fact differs from most hosts."""

    hosts: tuple[str, ...]
    value: str
    usual: str
    usual_on: tuple[str, ...]

    def describe(self, what: str) -> str:
        """Describe both values, and where the usual one is."""
        return f"{what} {self.value}, on {named(self.usual_on)} {self.usual}"


def common_findings(
    facts: Mapping[str, HostFacts],
    *,
    shared: SharedNetwork | None,
    ranks: Mapping[str, int],
    exports: Collection[str],
    software: bool = True,
) -> tuple[Finding, ...]:
    """Return the problems of these hosts, errors first; facts that were not probed are not checked.

    `shared` is the network that they share, `ranks` the number of ranks of each host, `exports` the names of the
    variables that every rank gets from the launcher. Without `software` the ranks run in an image, which has its own.
    """
    conditions = {host: of_one.condition for host, of_one in facts.items() if of_one.condition is not None}
    findings = [
        *(_software(facts, {host: own.software for host, own in conditions.items()}) if software else ()),
        *(_network(shared) if shared else ()),
        *_limits(facts, conditions, ranks, over_tcp=TCP_ALONE in exports),
        *_programs(conditions),
        *_disks(conditions),
        *_settings(conditions, exports),
    ]
    return errors_first(findings)


def folder_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Yield problems of a run folder and the folders that it reads."""
    by_host = {host: of_one.condition.folders for host, of_one in facts.items() if of_one.condition is not None}
    for host, (runs, *_) in by_host.items():
        if not runs.writable:
            remedy = "give this user the right to, or name another one with --runs-dir"
            yield error(host, "run folder", f"{runs.path} cannot be written there", remedy)
    for place in range(1, max(map(len, by_host.values()), default=0)):
        without = tuple(host for host, folders in by_host.items() if not folders[place].there)
        if without and len(without) < len(by_host):
            path = by_host[without[0]][place].path
            yield warning(without, "data folder", f"{path} is missing there", "copy it there, or share it")


def errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity, errors first; merge a problem that several hosts share into one finding."""
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, hosts=()), []).extend(finding.hosts)
    merged = [replace(finding, hosts=tuple(dict.fromkeys(hosts))) for finding, hosts in alike.items()]
    return tuple(sorted(merged, key=lambda finding: SEVERITIES.index(finding.severity)))


def from_error(failure: LaunchError, hosts: Sequence[str], about: str) -> Finding:
    """Convert an error about these hosts to a finding."""
    text = str(failure).removeprefix(f"host {hosts[0]}: ")
    problem, _, remedy = text[:-1].partition(". ") if text.endswith(".") else text.rpartition(": ")
    if not (problem and remedy) or " said: " in text or text.startswith("the probe failed"):
        problem, remedy = text, "try it there by hand, or leave the host out"
    if failure.details and not problem.endswith(failure.details[-1]):
        problem += f" ({failure.details[-1].strip()})"
    return error(tuple(hosts), about, problem, remedy)


def find_outliers(values: Mapping[str, str]) -> list[Outlier]:
    """Return the hosts whose value differs from the most frequent one; in a tie the first is usual, never MISSING."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    usual = max(groups, key=lambda value: (value != MISSING, len(groups[value])), default="")
    return [
        Outlier(hosts=tuple(hosts), value=value, usual=usual, usual_on=tuple(groups[usual]))
        for value, hosts in groups.items()
        if value != usual
    ]


def named(hosts: Sequence[str]) -> str:
    """List the names of hosts; a long list is shortened."""
    more = f" and {len(hosts) - MAX_NAMED} more" if len(hosts) > MAX_NAMED else ""
    return ", ".join(hosts[:MAX_NAMED]) + more


def versions(software: Software) -> dict[str, str]:
    """Return the versions that must be equal on all hosts, by name."""
    return {name: getattr(software, name.lower()) or MISSING for name in REMEDIES}


def project(software: Software) -> str:
    """Describe version, commit and code of the project."""
    commit = f" commit {software.commit[:9]}" if software.commit else ""
    return f"{software.project or MISSING}{commit} code {software.code}"


def _software(facts: Mapping[str, HostFacts], software: Mapping[str, Software]) -> Iterator[Finding]:
    for name, remedy in REMEDIES.items():
        counts = [host for host in software if name != "driver" or facts[host].topology.gpus]  # CPUs need none
        for odd in find_outliers({host: versions(software[host])[name] for host in counts}):
            mend = remedy.format(usual=odd.usual) if software[odd.hosts[0]].project else SAME
            yield error(odd.hosts, name, odd.describe(name), mend)
    for odd in find_outliers({host: project(own) for host, own in software.items()}):
        unusual, usual = software[odd.hosts[0]], software[odd.usual_on[0]]
        if unusual.code == usual.code and None in (unusual.commit, usual.commit):
            continue  # equal code, but this host has no git
        report = warning if unusual.code == usual.code else error  # ranks reject different code
        mend = f"`git checkout {(usual.commit or '...')[:12]}` there, without changes of its own"
        yield report(odd.hosts, "project", odd.describe("project"), mend)


def _network(shared: SharedNetwork) -> Iterator[Finding]:
    known = {host: own for host, own in shared.interfaces.items() if own.mtu is not None}
    for odd in find_outliers({host: str(own.mtu) for host, own in known.items()}):
        name = known[odd.hosts[0]].name
        problem = f"{odd.describe(f'the MTU of {name} is')}, and large packets may be lost"
        yield warning(odd.hosts, "MTU", problem, f"`ip link set dev {name} mtu {odd.usual}` there, as root")
    known = {host: own for host, own in shared.interfaces.items() if own.speed_mbps is not None}
    for odd in find_outliers({host: f"{own.speed_mbps} Mb/s" for host, own in known.items()}):
        name = known[odd.hosts[0]].name
        remedy = f"`ethtool {name}` there; look at its cable and switch port, or name another network with --network"
        yield warning(odd.hosts, "Mb/s", odd.describe(f"{name} runs at"), remedy)


def _limits(
    facts: Mapping[str, HostFacts], conditions: Mapping[str, Condition], ranks: Mapping[str, int], *, over_tcp: bool
) -> Iterator[Finding]:
    for host, own in conditions.items():
        rdma = not over_tcp and any(port.active for nic in facts[host].topology.nics for port in nic.ports)
        locked, shm, needed = own.locked_memory_mib, own.shm_free_mib, SHM_MIB_PER_RANK * ranks.get(host, 1)
        if rdma and locked is not None and locked < LOCKED_MIB:
            problem = f"a process may lock {locked} MiB, too little for NCCL over InfiniBand"
            remedy = "`* - memlock unlimited` in /etc/security/limits.conf, --ulimit memlock=-1 for a container"
            yield error(host, "locked memory", problem, remedy)
        if shm is None or shm < needed:
            free = f"{SHM} does not exist" if shm is None else f"{SHM} has {shm} MiB free, its ranks need {needed}"
            remedy = f"--ipc=host or --shm-size=8g for a container, else `mount -o remount,size=8g {SHM}` as root"
            yield (warning if shm else error)(host, SHM, free, remedy)


def _programs(conditions: Mapping[str, Condition]) -> Iterator[Finding]:
    for host, own in conditions.items():
        if own.missing_program is not None:
            problem = f"the program {own.missing_program!a} is missing or may not be executed there"
            remedy = "install it there at the same path, or pass a path after -- that all hosts have"
            yield error(host, "program", problem, remedy)


def _disks(conditions: Mapping[str, Condition]) -> Iterator[Finding]:
    blind = tuple(host for host, own in conditions.items() if own.sees_token is False)
    if blind:
        problem = f"{conditions[blind[0]].folders[0].path} is another folder there than here"
        remedy = "mount the same one there (NFS), or name a shared one, else checkpoints are lost with rank 0's host"
        yield warning(blind, "shared folder", problem, remedy)
    for host, own in conditions.items():
        for folder in own.folders:
            if folder.free_mib is not None and folder.free_mib < FREE_MIB:
                problem = f"{folder.path} has {folder.free_mib / 1024:.1f} GiB free"
                yield warning(host, "free disk", problem, "remove old runs there, or name a folder on a larger disk")


def _settings(conditions: Mapping[str, Condition], exports: Collection[str]) -> Iterator[Finding]:
    own = {host: {setting.name: setting for setting in condition.settings} for host, condition in conditions.items()}
    names = sorted({name for settings in own.values() for name in settings} - SET_BY_PLAN - set(exports))
    for name in names:
        values = {host: ascii(settings[name].value) if name in settings else NOT_SET for host, settings in own.items()}
        for odd in find_outliers(values):
            setter = next(host for host in (*odd.hosts, *odd.usual_on) if name in own[host])
            setting = own[setter][name]
            remedy = f"`export {name}={setting.value}` here gives it to all ranks, or take it out of {setting.source}"
            yield warning(odd.hosts, name, odd.describe(f"{name} is"), f"{remedy} on {setter}")
