"""Start a failed run again, with the hosts that are left, until it has finished or nothing new comes of it.

After a failure what is left of it is ended on every host; the hosts are listed and asked anew; as many ranks as fit are
started. The program finds its run folder by HVDLAUNCH_JOB, which stays, and goes on from its newest checkpoint.
"""

import itertools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import LaunchError, PlacementError, ProcessError
from launch.hosts.host import Host
from launch.hosts.hostfile import to_option
from launch.machine.topology import Topology, restrict
from launch.reach.ask import answers
from launch.reach.probe import HostFacts
from launch.start.command import hosts as hosts_of
from launch.start.prepare import Ready, Wanted, allocation, own_slots, prepare
from launch.watch.leftovers import end_on
from launch.watch.run import Ended, run

WAIT_S = 600.0  # for hosts, where too few are left: one that restarts takes some minutes
LONGEST_PAUSE_S = 30.0
SETTLE_S = 2.0  # until a driver no longer counts the GPU of a process that has ended as busy
FRUITLESS = 3
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
FINAL = (0, BAD_INPUT, TOO_MANY_SKIPPED)
NO_PROGRESS = 5
MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Again:
    """When a run is started again."""

    restarts: int  # at most
    min_np: int  # with fewer ranks it waits for hosts
    grace_s: float  # from the request to save and leave to the end


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What came of the attempts so far."""

    failures: int = 0
    fruitless: int = 0  # restarts in a row without a new checkpoint
    checkpoint: int | None = None  # the newest step that was saved
    ran: frozenset[int] = frozenset()  # numbers of ranks that the program has started with
    refused: frozenset[int] = frozenset()  # and those that it would not take, with status 2


@dataclass(frozen=True, kw_only=True)
class Away:
    """A host that could not be used when it was last asked."""

    times: int  # in a row
    until_s: float  # on time.monotonic(): it is not asked before, unless hosts are short


def supervise(read: Callable[[], Wanted], again: Again, environment: Mapping[str, str]) -> int:
    """Run it, and again after a failure; the exit status of the last attempt, 5 where restarts bring nothing new.

    `read` lists the hosts as they are then. LaunchError where the first attempt cannot be started.
    """
    wanted = read()
    ready = prepare(wanted, {**environment, "HVDLAUNCH_ATTEMPT": "0"}, Path.cwd())
    for remark in ready.remarks:
        _say(remark)
    environment = {**environment, "HVDLAUNCH_JOB": ready.environment["HVDLAUNCH_JOB"]}
    fleet = Fleet(read, wanted, ready)
    tally, attempt = Tally(), 0
    while True:
        ended = _attempt(ready, again, first=attempt == 0)
        np = len(ready.order.slots)
        tally = counted(tally, ended, np)
        status = outcome(tally, ended, np, again)
        if status is not None:
            if status and not ended.stopped:
                fleet.clean(ready)
            if status == NO_PROGRESS:
                _say(
                    f"{FRUITLESS} restarts in a row brought no new checkpoint: it ends here, with status {NO_PROGRESS}"
                )
            elif status not in FINAL and not ended.stopped:
                _say(f"--restarts {again.restarts}: no more is left")
            return status
        attempt += 1
        following = fleet.next_run(again, tally, {**environment, "HVDLAUNCH_ATTEMPT": str(attempt)})
        if following is None:
            return ended.status
        ready = following
        _say(restart_line(ready, tally, ended, again))


def counted(tally: Tally, ended: Ended, np: int) -> Tally:
    """The tally with one more attempt, of `np` ranks."""
    if ended.status == BAD_INPUT:
        return replace(tally, refused=tally.refused | {np})
    steps = [step for step in (tally.checkpoint, ended.checkpoint) if step is not None]
    checkpoint = max(steps, default=None)
    return replace(
        tally,
        failures=tally.failures + 1,
        fruitless=0 if checkpoint != tally.checkpoint or not tally.failures else tally.fruitless + 1,
        checkpoint=checkpoint,
        ran=tally.ran | {np},
    )


def outcome(tally: Tally, ended: Ended, np: int, again: Again) -> int | None:
    """The exit status with which it is over, None where another attempt follows; `tally` has this one in it."""
    if ended.stopped or ended.status in (0, TOO_MANY_SKIPPED):
        return ended.status
    if ended.status == BAD_INPUT:  # another number of ranks may be right where this one is new
        return None if tally.ran and np not in tally.ran else BAD_INPUT
    if tally.fruitless >= FRUITLESS:
        return NO_PROGRESS
    return ended.status if tally.failures > again.restarts else None


def ranks_that_fit(room: int, *, np: int, min_np: int, refused: Collection[int]) -> int | None:
    """The most ranks, from `min_np` to `np`, for which there is room, without numbers that were refused."""
    return next((ranks for ranks in range(min(np, room), min_np - 1, -1) if ranks not in refused), None)


def usable(hosts: Sequence[Host], topologies: Mapping[str, Topology], *, on_gpus: bool) -> tuple[Host, ...]:
    """The hosts of which something is known, with no more slots than they have free GPUs if ranks run on GPUs."""
    kept = []
    for host in hosts:
        if (topology := topologies.get(host.name)) is not None:
            free = sum(gpu.unusable is None for gpu in topology.gpus)
            kept.append(replace(host, slots=min(host.slots, free)) if on_gpus else host)
    return tuple(host for host in kept if host.slots)


def pause_s(times: int) -> float:
    """How long to wait after so many failures in a row: 1, 2, 4... at most 30 s."""
    return min(2.0 ** min(times - 1, 10), LONGEST_PAUSE_S)


def restart_line(ready: Ready, tally: Tally, ended: Ended, again: Again) -> str:
    """What failed, how many ranks go on where, and from which step."""
    used = hosts_of(ready.order.slots)
    where = to_option(used) if len(used) <= MOST_NAMED else f"{len(used)} hosts"
    ranks = "1 rank" if len(ready.order.slots) == 1 else f"{len(ready.order.slots)} ranks"
    start = "no checkpoint was saved yet" if tally.checkpoint is None else f"from step {tally.checkpoint}"
    why = ended.why or f"status {ended.status}"
    return f"restart {tally.failures} of {again.restarts} after: {why}; {ranks} on {where}, {start}"


class Fleet:
    """The hosts of a run: cleaned, asked and counted anew for every restart."""

    def __init__(self, read: Callable[[], Wanted], wanted: Wanted, ready: Ready) -> None:
        self._read, self._wanted = read, wanted
        self._on_gpus = ready.order.slots[0].gpu is not None
        self._mpi, self._python = ready.order.mpi, ready.order.python
        self._job = ready.environment["HVDLAUNCH_JOB"]
        self._away: dict[str, Away] = {}
        self._said: str | None = None

    def clean(self, ready: Ready) -> None:
        """End what an attempt has left behind."""
        self._end_leftovers([host.name for host in hosts_of(ready.order.slots)])

    def next_run(self, again: Again, tally: Tally, environment: Mapping[str, str]) -> Ready | None:
        """The next attempt, once enough hosts can be used; None, with a line, if for too long they cannot."""
        end = time.monotonic() + WAIT_S
        for times in itertools.count(1):
            try:
                return self._prepared(again, tally, environment, all_hosts=times > 1)
            except LaunchError as error:
                why = " ".join(str(error).split())
            if time.monotonic() + pause_s(times) > end:
                break
            self._say_once(f"{why}; waiting up to {WAIT_S:g} s")
            time.sleep(pause_s(times))
        _say(f"{why}; after {WAIT_S:g} s it ends here")
        return None

    def _prepared(self, again: Again, tally: Tally, environment: Mapping[str, str], *, all_hosts: bool) -> Ready:
        wanted = self._wanted = self._read_again()
        listed = wanted.hosts or allocation(environment)
        names = [host.name for host in listed] if listed else ["localhost"]
        now = time.monotonic()
        asked = [name for name in names if all_hosts or name not in self._away or self._away[name].until_s <= now]
        facts = self._ask(asked)
        if self._on_gpus and any(_is_busy(one.topology) for one in facts.values()):
            time.sleep(SETTLE_S)
            facts = self._ask(list(facts))
        topologies = {name: _narrowed(one.topology, wanted.gpus) for name, one in facts.items()}
        hosts = usable(listed or own_slots(wanted, topologies), topologies, on_gpus=self._on_gpus)
        room = sum(host.slots for host in hosts)
        np = ranks_that_fit(room, np=wanted.np, min_np=again.min_np, refused=tally.refused)
        if np is None:
            but = ", and the program does not take so few ranks" if room >= again.min_np else ""
            raise PlacementError(f"{room} slots are left, --min-np is {again.min_np}{but}")
        return prepare(
            replace(wanted, np=np, hosts=hosts, gpus="auto" if self._on_gpus else "none"),
            environment,
            Path.cwd(),
            {name: replace(one, topology=topologies[name]) for name, one in facts.items()},
        )

    def _ask(self, names: Sequence[str]) -> dict[str, HostFacts]:
        """The facts of those of these hosts that can be used, on which nothing of the job is left."""
        ended = self._end_leftovers(names)
        found: dict[str, HostFacts | LaunchError] = {
            name: why for name, why in ended.items() if isinstance(why, LaunchError)
        }
        reached = [name for name in names if name not in found]
        found |= answers(reached, mpirun=self._mpi, python=self._python, folder=str(Path.cwd()), gpus=self._on_gpus)
        for name, answer in found.items():
            if isinstance(answer, HostFacts):
                self._away.pop(name, None)
                continue
            before = self._away.get(name)
            if before is None:
                _say(f"{' '.join(str(answer).split())}; it is left out")
            times = 1 if before is None else before.times + 1
            self._away[name] = Away(times=times, until_s=time.monotonic() + pause_s(times))
        return {name: answer for name, answer in found.items() if isinstance(answer, HostFacts)}

    def _end_leftovers(self, names: Sequence[str]) -> dict[str, int | LaunchError]:
        ended = end_on(names, self._job, python=self._python, folder=str(Path.cwd()))
        counts = {name: count for name, count in ended.items() if isinstance(count, int) and count}
        if counts:
            _say(f"{sum(counts.values())} of its processes still ran on {', '.join(counts)}: killed")
        return ended

    def _read_again(self) -> Wanted:
        try:
            return self._read()
        except LaunchError as error:
            self._say_once(f"{error}; the hosts stay as they were")
            return self._wanted

    def _say_once(self, line: str) -> None:
        if line != self._said:
            _say(line)
        self._said = line


def _attempt(ready: Ready, again: Again, *, first: bool) -> Ended:
    try:
        return run(ready, grace_s=again.grace_s)
    except ProcessError as error:
        if first:
            raise
        return Ended(status=1, run_folder=None, why=str(error), stopped=False)


def _narrowed(topology: Topology, gpus: str | Collection[int]) -> Topology:
    """The topology with the GPUs that --gpus does not name marked as not to be used."""
    if isinstance(gpus, str):
        return topology
    return restrict(topology, ",".join(str(gpu.index) for gpu in topology.gpus if gpu.index in gpus))


def _is_busy(topology: Topology) -> bool:
    return any((gpu.unusable or "").startswith("busy") for gpu in topology.gpus)


def _say(line: str) -> None:
    print(f"hvdlaunch: {line}", file=sys.stderr, flush=True)
