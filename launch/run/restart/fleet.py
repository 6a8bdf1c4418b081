"""The hosts of a run with restarts: listed, cleaned and probed again for every restart."""

import collections
import contextlib
import itertools
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from launch import output
from launch.errors import HostError, LaunchError, PlacementError, harmless, in_one_line
from launch.hosts.host import Host, shown
from launch.hosts.host_facts import HostFacts
from launch.hosts.probe import at_once, is_local, probe_hosts
from launch.hosts.ssh import Ssh
from launch.machine.condition import Inspection, open_inspection
from launch.machine.topology import Topology, is_busy, named
from launch.placement.findings import common_findings
from launch.placement.slots import hosts_of, with_slots
from launch.run.start.decide import measured_topologies, own_hosts
from launch.run.start.environment import exported
from launch.run.start.prepare import prepare
from launch.run.start.render import PreparedRun
from launch.run.start.request import RunRequest, listed
from launch.run.supervise.leftovers import MARK, end_here
from launch.run.supervise.spot.notices import hosts_ending

WAIT_S = 600.0  # for hosts, if too few are left: a reboot takes a few minutes
MAX_PAUSE_S = 30.0
ANSWER_S = 10.0  # of a host that ends what is left there
SETTLE_S = 2.0  # until a driver no longer counts the GPU of an ended process as busy, perhaps
FREE_S = 50.0  # for the memory of this run's GPUs to be free; a driver may take half a minute
MOST_FAILURES = 2  # a host with these is left out for the rest of the run, if enough others are left


class Fleet:
    """The hosts of a run; `read_request` lists the current ones."""

    def __init__(
        self,
        read_request: Callable[[], RunRequest],
        request: RunRequest,
        prepared: PreparedRun,
        environment: Mapping[str, str],
    ) -> None:
        self._read_request, self._request, self._environment = read_request, request, environment
        self._np = len(prepared.plan.slots)
        self._on_gpus = prepared.plan.slots[0].gpu is not None
        self._gpu_choice: Literal["all", "none"] = "all" if self._on_gpus else "none"
        self._first = prepared
        # Hosts not in this set are checked before they get ranks.
        self._known = {host.name for host in hosts_of(prepared.plan.slots)}
        self._facts = {} if self._on_gpus else dict(prepared.answers)  # of the hosts that are not suspect
        # Unusable hosts: consecutive failures, and when on time.monotonic() to probe again, unless hosts are short.
        self._backoffs: dict[str, tuple[int, float]] = {}
        self._failures: collections.Counter[str] = collections.Counter()  # of this run, by host
        self._declined: set[str] = set()  # hosts that could not join: only a restart probes them again
        self._gpus = {(slot.host, slot.gpu) for slot in prepared.plan.slots}  # that this run has used
        self._last_line: str | None = None
        self._unmeasured: set[str] = set()  # excluded hosts that were already reported

    def clean(self, prepared: PreparedRun) -> None:
        """End the processes that an attempt has left behind."""
        self._end_leftovers([host.name for host in hosts_of(prepared.plan.slots)])

    def note_failure(self, host: str, *, is_lost: bool = False) -> None:
        """Count a failure of this host; after MOST_FAILURES it is left out, also if it answers again.

        A host that is lost is not waited for: it is probed again if hosts are short, and to join a run that has begun.
        """
        if is_lost:
            self._backoffs[host] = 1, time.monotonic() + pause_s(1)
        self._failures[host] += 1
        if self._failures[host] == MOST_FAILURES and len(self._known) > 1:
            say(f"warning: host {host} has failed {MOST_FAILURES} times; leaving it out if enough others are left")

    def joining(self, prepared: PreparedRun, refused: Collection[int]) -> tuple[str, ...]:
        """Return the hosts with which this run would have more ranks, once they answer; called during the run."""
        request, used = self._read_request(), {slot.host for slot in prepared.plan.slots}
        left_out = used | self._declined | {host for host, times in self._failures.items() if times >= MOST_FAILURES}
        hosts = [host for host in listed(request, prepared.environment) or () if host.name not in left_out]
        replies = self._probe([host.name for host in hosts]) if hosts else {}
        replies |= hosts_ending(list(replies), request.spot, ssh=request.ssh, python=self._first.launcher.python)
        facts = {name: answer for name, answer in replies.items() if isinstance(answer, HostFacts)}
        topologies = {name: named(answer.topology, request.gpus) for name, answer in facts.items()}
        joining = self._usable(hosts, topologies, request)
        now, room = len(prepared.plan.slots), sum(host.slots for host in joining)
        group = request.ranks_per_replica or 1
        more = ranks_that_fit(now + room, np=self._np, min_np=now + 1, refused=refused, ranks_per_replica=group)
        return () if more is None else tuple(host.name for host in joining)

    def decline(self, hosts: Collection[str]) -> None:
        """Do not probe these hosts during a run again: it has no more ranks with them."""
        self._declined |= {*hosts}

    def next_run(
        self, restart: int, *, min_np: int, refused: Collection[int], are_suspect: bool, first: str | None = None
    ) -> PreparedRun | None:
        """Prepare the next attempt, once enough hosts are usable; print an error and return None after WAIT_S.

        The attempt has at least `min_np` ranks, and not a number of ranks that the program has `refused`. Without GPUs,
        hosts are probed again only if they are suspect. The `first` host gets rank 0, if it is usable.
        """
        if are_suspect:
            self._facts.clear()
        end = time.monotonic() + WAIT_S
        for times in itertools.count(1):
            try:
                return self._prepare(restart, min_np=min_np, refused=refused, all_hosts=times > 1, first=first)
            except LaunchError as error:
                why = in_one_line(error)
            self._facts.clear()
            if time.monotonic() + pause_s(times) > end:
                break
            self._say_once(f"note: {why}. Waiting up to {WAIT_S:g} s for enough hosts.")
            time.sleep(pause_s(times))
        say(f"error: {why}. Gave up after waiting {WAIT_S:g} s.")
        return None

    def _prepare(
        self, restart: int, *, min_np: int, refused: Collection[int], all_hosts: bool, first: str | None
    ) -> PreparedRun:
        request = self._request = self._new_request()
        known = listed(request, self._environment)
        names = [host.name for host in known] if known else ["localhost"]
        exports = exported(self._environment, request.exports)
        now = time.monotonic()
        is_due = {name: all_hosts or self._backoffs.get(name, (0, now))[1] <= now for name in names}
        facts = self._ask([name for name in names if is_due[name]], exports)
        while (waits := self._not_yet_free(facts)) and time.monotonic() < now + FREE_S:
            time.sleep(SETTLE_S)
            others = {name: answer for name, answer in facts.items() if name not in waits}
            facts = others | self._ask(waits, exports)
        facts = {name: replace(answer, topology=named(answer.topology, request.gpus)) for name, answer in facts.items()}
        topologies, unmeasured = measured_topologies(request, facts)
        for name in unmeasured:
            del topologies[name]
            if name not in self._unmeasured:
                _say_skipped(unmeasured[name])
        self._unmeasured = set(unmeasured)
        group = request.ranks_per_replica or 1
        hosts = self._usable(known or own_hosts(request, names), topologies, request)
        hosts = tuple(sorted(hosts, key=lambda host: host.name != first))
        sound = tuple(host for host in hosts if self._failures[host.name] < MOST_FAILURES)
        for chosen in (sound, hosts):
            room = sum(host.slots for host in chosen)
            np = ranks_that_fit(room, np=self._np, min_np=min_np, refused=refused, ranks_per_replica=group)
            if np is not None:
                break
        else:
            but = ", and the program does not take so few ranks" if room >= min_np else ""
            raise PlacementError(f"{room} slots are left, --min-np is {min_np}{but}")
        attempt = replace(self._first.plan.request.attempt, restart=restart)
        prepared = prepare(
            replace(request, np=np, hosts=chosen, per_host=None, gpus=self._gpu_choice, attempt=attempt),
            self._environment,
            Path.cwd(),
            {name: replace(facts[name], topology=own, condition=None) for name, own in topologies.items()},
        )
        self._gpus |= {(slot.host, slot.gpu) for slot in prepared.plan.slots}
        return prepared

    def _usable(
        self, hosts: Sequence[Host], topologies: Mapping[str, Topology], request: RunRequest
    ) -> tuple[Host, ...]:
        left = [host for host in hosts if host.name in topologies]
        return usable_hosts(
            with_slots(left, topologies, np=self._np, gpus=self._gpu_choice),
            topologies,
            on_gpus=self._on_gpus,
            ranks_per_replica=request.ranks_per_replica or 1,
        )

    def _not_yet_free(self, facts: Mapping[str, HostFacts]) -> list[str]:
        """Return the hosts on which a GPU that this run has used is busy."""
        busy = {name: [gpu.index for gpu in answer.topology.gpus if is_busy(gpu)] for name, answer in facts.items()}
        return [name for name, gpus in busy.items() if any((name, gpu) in self._gpus for gpu in gpus)]

    def _ask(self, names: Sequence[str], exports: Collection[str]) -> dict[str, HostFacts]:
        """Probe these hosts and return the facts of the usable ones; end the job's remaining processes first.

        A new host is excluded if a run with it would fail; `exports` are the variables that ranks get.
        """
        ended = self._end_leftovers(names)
        replies: dict[str, HostFacts | LaunchError] = {
            name: why for name, why in ended.items() if isinstance(why, LaunchError)
        }
        reached = [name for name in names if name not in replies]
        are_new = self._request.check and not self._known.issuperset(reached)
        with (
            open_inspection(Path.cwd(), program=self._first.plan.executable)
            if are_new
            else contextlib.nullcontext() as inspection
        ):
            replies |= {name: self._facts[name] for name in reached if name in self._facts}
            replies |= self._probe([name for name in reached if name not in self._facts], inspection)
        answers = {name: answer for name, answer in replies.items() if isinstance(answer, HostFacts)}
        replies |= unfit(answers, self._known, exports=exports, software=self._request.apptainer is None)
        replies |= hosts_ending(
            list(answers), self._request.spot, ssh=self._request.ssh, python=self._first.launcher.python
        )
        for name, answer in replies.items():
            if isinstance(answer, HostFacts):
                self._backoffs.pop(name, None)
                continue
            if name not in self._backoffs:
                _say_skipped(answer)
            times = self._backoffs.get(name, (0, 0.0))[0] + 1
            self._backoffs[name] = times, time.monotonic() + pause_s(times)
        usable = {name: answer for name, answer in replies.items() if isinstance(answer, HostFacts)}
        self._known |= usable.keys()
        self._facts = {} if self._on_gpus else dict(usable)  # a GPU may be lost or taken at any time
        return usable

    def _probe(self, names: Sequence[str], inspection: Inspection | None = None) -> dict[str, HostFacts | LaunchError]:
        return probe_hosts(
            names,
            ssh=self._request.ssh,
            mpirun=self._first.launcher.mpi,
            python=self._first.launcher.python,
            folder=str(Path.cwd()),
            gpus=self._on_gpus,
            inspection=inspection,
        )

    def _end_leftovers(self, names: Sequence[str]) -> dict[str, int | LaunchError]:
        job, python = self._first.environment["HVDLAUNCH_JOB"], self._first.launcher.python
        ended = end_on(names, job, ssh=self._request.ssh, python=python, folder=str(Path.cwd()))
        counts = {name: count for name, count in ended.items() if isinstance(count, int) and count}
        if counts:
            say(f"note: {sum(counts.values())} leftover processes killed on {', '.join(counts)}")
        return ended

    def _new_request(self) -> RunRequest:
        try:
            return self._read_request()
        except LaunchError as error:
            self._say_once(f"warning: {in_one_line(error)}; keeping the previous hosts")
            return self._request

    def _say_once(self, line: str) -> None:
        if line != self._last_line:
            say(line)
        self._last_line = line


def end_on(hosts: Sequence[str], job: str, *, ssh: Ssh, python: str, folder: str) -> dict[str, int | LaunchError]:
    """End the processes of a job on all hosts in parallel; return each host's number of processes, or an error."""
    command = [python, "-P", "-m", "launch.run.supervise.leftovers", job]

    def end_there(host: str) -> int | LaunchError:
        if is_local(host):
            return end_here(job)
        try:
            answer = ssh.ask(host, command, folder, mark=MARK, timeout_s=ANSWER_S)
        except LaunchError as error:
            return error
        if not re.fullmatch("[0-9]{1,9}", answer):
            number = f"{shown(answer)} is not a number of killed processes"
            return HostError(f"host {host}: {number}: install the same version there")
        return int(answer)

    return at_once(end_there, hosts)


def ranks_that_fit(
    room: int, *, np: int, min_np: int, refused: Collection[int], ranks_per_replica: int = 1
) -> int | None:
    """Return the most ranks in whole replicas, from `min_np` to `np`, that have room and were not refused."""
    fitting = range(min(np, room), min_np - 1, -ranks_per_replica)
    return next((ranks for ranks in fitting if ranks not in refused), None)


def unfit(
    answers: Mapping[str, HostFacts], known: Collection[str], *, exports: Collection[str], software: bool
) -> dict[str, HostError]:
    """Explain why hosts that are not `known` cannot join the others; usable or unchecked hosts are missing.

    `exports` and `software` are the arguments of launch.placement.findings.common_findings.
    """
    before = {name: answer for name, answer in answers.items() if name in known}
    reasons = {}
    for name in answers.keys() - before.keys():
        both = {**before, name: answers[name]}
        findings = common_findings(both, shared=None, ranks={}, exports=exports, software=software)
        why = [
            f"{finding.problem}: {finding.remedy}"
            for finding in findings
            if finding.severity == "error" and name in finding.hosts
        ]
        if why:
            reasons[name] = HostError(f"host {name}: {'; '.join(why)}")
    return reasons


def usable_hosts(
    hosts: Sequence[Host], topologies: Mapping[str, Topology], *, on_gpus: bool, ranks_per_replica: int = 1
) -> tuple[Host, ...]:
    """Return the hosts that have a topology, with slots for whole replicas; for runs on GPUs, only for free GPUs."""
    kept = []
    for host in hosts:
        if (topology := topologies.get(host.name)) is not None:
            slots = min(host.slots, topology.free) if on_gpus else host.slots
            kept.append(replace(host, slots=slots // ranks_per_replica * ranks_per_replica))
    return tuple(host for host in kept if host.slots)


def pause_s(times: int) -> float:
    """Return the pause after this number of consecutive failures: 1, 2, 4... at most 30 s."""
    return min(2.0 ** min(times - 1, 10), MAX_PAUSE_S)


def _say_skipped(why: LaunchError) -> None:
    say(f"warning: {in_one_line(why).removesuffix('.')}; skipping this host")


def say(line: str) -> None:
    """Print one line for the user while a run is supervised."""
    output.say(harmless(line))
