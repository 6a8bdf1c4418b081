"""Restarts a failed run on the remaining hosts, until it has finished or restarts make no progress.

After a failure all remaining processes are ended on every host, the hosts are listed and probed again, and as many
ranks as fit are started. The program finds its run folder by HVDLAUNCH_JOB, which does not change, and resumes from its
newest checkpoint. While a run has fewer ranks than at first, a host that is back or new joins by a restart for which
the ranks save.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.errors import CommandError, ProcessError
from launch.hosts.hostfile import to_option
from launch.placement.slots import hosts_of
from launch.run.restart.fleet import Fleet, say
from launch.run.start.keepers import Keepers
from launch.run.start.prepare import prepare
from launch.run.start.render import PreparedRun
from launch.run.start.request import RunRequest
from launch.run.start.snapshots import Snapshots
from launch.run.supervise import journal
from launch.run.supervise.growth import Growth
from launch.run.supervise.run import FAILED, RunResult, run
from launch.run.supervise.spot.notices import require_notices

MAX_RESTARTS_WITHOUT_PROGRESS = 3
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
TAKEN = 75  # status of launch.run.rank.bind: another run has claimed a GPU since it was selected
FINAL = (0, BAD_INPUT, TOO_MANY_SKIPPED)
NO_PROGRESS = 5
MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a run is restarted."""

    restarts: int  # maximum number
    min_np: int | None  # waits for hosts rather than run with fewer ranks; None: as many as the first attempt
    grace_s: float  # time to save and stop after the request


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The results of all attempts so far."""

    failures: int = 0
    fruitless: int = 0  # consecutive restarts without a new checkpoint or snapshot
    checkpoint: int | None = None  # the newest saved step
    snapshot: int | None = None  # the newest step in memory
    ran: frozenset[int] = frozenset()  # numbers of ranks with which the program has run
    refused: frozenset[int] = frozenset()  # numbers of ranks that the program has refused, with status 2


def run_with_restarts(
    read_request: Callable[[], RunRequest], policy: RestartPolicy, environment: Mapping[str, str]
) -> int:
    """Run with restarts; return the exit status of the last attempt, or 5 if restarts make no progress.

    `read_request` lists the current hosts. Raises LaunchError if the first attempt cannot be started.
    """
    with Keepers() as keepers, Snapshots() as snapshots:
        return _run_with_restarts(read_request, policy, environment, keepers, snapshots)


def _run_with_restarts(
    read_request: Callable[[], RunRequest],
    policy: RestartPolicy,
    environment: Mapping[str, str],
    keepers: Keepers,
    snapshots: Snapshots,
) -> int:
    request = read_request()
    first = replace(keepers.attempt, max_restarts=policy.restarts, snapshots=snapshots.place)
    prepared = prepare(replace(request, attempt=first), environment, Path.cwd())
    printed: set[str] = set()
    _say_new(prepared.plan.remarks, printed)
    first_np = len(prepared.plan.slots)
    min_np = first_np if policy.min_np is None else policy.min_np
    if min_np > first_np:
        raise CommandError(f"--min-np {min_np}: only {first_np} ranks fit: pass a number up to that")
    require_notices(prepared)
    environment = {**environment, "HVDLAUNCH_JOB": prepared.environment["HVDLAUNCH_JOB"]}
    fleet = Fleet(read_request, request, prepared, environment)
    tally, attempt, has_only_folder = Tally(), 0, False
    while True:
        snapshots.begin(prepared.plan)
        np = len(prepared.plan.slots)
        growth = Growth(partial(fleet.joining, prepared, tally.refused)) if np < first_np else None
        result = _attempt(prepared, policy, keepers, growth, first=attempt == 0)
        tally = with_attempt(tally, result, np)
        status = final_status(tally, result, np, policy)
        if status is not None:
            if status and not result.stopped:
                fleet.clean(prepared)
            if status == NO_PROGRESS:
                say(
                    f"error: {MAX_RESTARTS_WITHOUT_PROGRESS} restarts in a row made no progress (no new state on disk "
                    f"or in memory): giving up with status {NO_PROGRESS}"
                )
            elif status not in FINAL and not result.stopped:
                say(f"error: all {policy.restarts} restarts are used up (--restarts {policy.restarts})")
            return status
        attempt += 1
        host = prepared.plan.slots[0].host
        # Only the first attempt looks at folders; an attempt that ends early has no report.
        has_only_folder |= not result.is_shared or host in prepared.plan.apart
        if result.host is not None:
            is_needed = has_only_folder and result.host == host
            fleet.note_failure(result.host, is_lost=result.is_host_lost and not is_needed)
        following = fleet.next_run(
            attempt,
            min_np=min_np,
            refused=tally.refused,
            are_suspect=tally.fruitless > 0 or not (result.is_ranks_fault or result.is_host_lost),
            first=host if result.new_hosts else None,  # it has the run folder
        )
        if following is None:
            return result.status or FAILED
        if len(following.plan.slots) <= np:
            fleet.decline(result.new_hosts)
        if has_only_folder and host != following.plan.slots[0].host:
            say(
                f"error: host {host} had rank 0 and is left out, and the others do not share its run folder. To resume "
                f"when it is back, run the same command with HVDLAUNCH_JOB={environment['HVDLAUNCH_JOB']} before it. "
                "To survive such a loss, put --runs-dir on a folder that all hosts share."
            )
            return result.status or FAILED
        prepared = following
        _say_new(prepared.plan.remarks, printed)
        say(restart_line(prepared, tally, result, policy, is_in_memory=snapshots.is_used))


def with_attempt(tally: Tally, result: RunResult, np: int) -> Tally:
    """Return the tally with another attempt of `np` ranks."""
    if result.new_hosts and result.status == 0:
        return replace(tally, fruitless=0, checkpoint=result.checkpoint, ran=tally.ran | {np})
    if result.status == BAD_INPUT:
        return replace(tally, refused=tally.refused | {np})
    if result.status == TAKEN:  # the program has not run; the next attempt selects other GPUs
        return replace(tally, failures=tally.failures + 1)
    checkpoint, snapshot = _later(tally.checkpoint, result.checkpoint), _later(tally.snapshot, result.snapshot)
    is_new = (checkpoint, snapshot) != (tally.checkpoint, tally.snapshot)
    return replace(
        tally,
        failures=tally.failures + 1,
        fruitless=0 if is_new or not tally.ran else tally.fruitless + result.has_report,
        checkpoint=checkpoint,
        snapshot=snapshot,
        ran=tally.ran | {np},
    )


def _later(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


def final_status(tally: Tally, result: RunResult, np: int, policy: RestartPolicy) -> int | None:
    """Return the exit status if the run is over, None before another attempt; `tally` includes this attempt."""
    if (result.new_hosts or result.is_for_notice) and tally.failures <= policy.restarts:
        return None
    if result.stopped or result.is_finished or result.status in (0, TOO_MANY_SKIPPED):
        return result.status
    if result.status == BAD_INPUT:  # another number of ranks may be valid if this one is new
        return None if tally.ran and np not in tally.ran else BAD_INPUT
    if tally.fruitless >= MAX_RESTARTS_WITHOUT_PROGRESS:
        return NO_PROGRESS
    return result.status if tally.failures > policy.restarts else None


def restart_line(
    prepared: PreparedRun, tally: Tally, result: RunResult, policy: RestartPolicy, *, is_in_memory: bool
) -> str:
    """Describe the failure or new hosts, the number and hosts of the next ranks, and the step where they resume."""
    used = hosts_of(prepared.plan.slots)
    where = to_option(used) if len(used) <= MAX_NAMED else f"{len(used)} hosts"
    ranks = "1 rank" if len(prepared.plan.slots) == 1 else f"{len(prepared.plan.slots)} ranks"
    if tally.checkpoint is None:
        start = "from the state in memory" if is_in_memory else "no checkpoint was saved yet"
    else:
        start = f"from step {tally.checkpoint}" + " or later, in memory" * is_in_memory
    if result.new_hosts:
        are = "host {} is" if len(result.new_hosts) == 1 else "hosts {} are"
        return f"note: {are.format(', '.join(result.new_hosts[:MAX_NAMED]))} back or new; {ranks} on {where}, {start}"
    why = result.why or f"status {result.status}"
    return f"warning: restart {tally.failures} of {policy.restarts} after: {why}; {ranks} on {where}, {start}"


def _say_new(remarks: Iterable[str], printed: set[str]) -> None:
    for remark in remarks:
        if remark not in printed:
            say(remark)
        printed.add(remark)


def _attempt(
    prepared: PreparedRun, policy: RestartPolicy, keepers: Keepers, growth: Growth | None, *, first: bool
) -> RunResult:
    journal.begin(prepared)
    try:
        with growth or contextlib.nullcontext():
            result = run(prepared, grace_s=policy.grace_s, keepers=keepers, growth=growth)
    except ProcessError as error:
        if first:
            raise
        result = RunResult(status=1, run_folder=None, why=str(error), stopped=False)
    journal.end(prepared, result)
    return result
