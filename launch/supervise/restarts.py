"""Start a failed run again, on the hosts that are left, until it has finished or restarts bring nothing new.

After a failure what it has left is ended on every host; the hosts are listed and asked again; as many ranks as fit are
started. The program finds its run folder by HVDLAUNCH_JOB, which stays, and goes on from its newest checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import CommandError, ProcessError
from launch.hosts.hostfile import to_option
from launch.start.command import hosts_of
from launch.start.prepare import prepare
from launch.start.render import PreparedRun
from launch.start.request import RunRequest
from launch.supervise.fleet import Fleet, say
from launch.supervise.run import RunResult, run

MAX_RESTARTS_WITHOUT_PROGRESS = 3
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
TAKEN = 75  # of launch.rank.bind: another run has taken a GPU since it was chosen
FINAL = (0, BAD_INPUT, TOO_MANY_SKIPPED)
NO_PROGRESS = 5
MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a run is started again."""

    restarts: int  # at most
    min_np: int | None  # with fewer ranks it waits for hosts; None: than the first attempt has
    grace_s: float  # from the request to save and leave to the end


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What came of the attempts so far."""

    failures: int = 0
    fruitless: int = 0  # restarts in a row without a new checkpoint
    checkpoint: int | None = None  # the newest step that was saved
    ran: frozenset[int] = frozenset()  # numbers of ranks with which the program has run
    refused: frozenset[int] = frozenset()  # numbers of ranks that it has refused, with status 2


def run_with_restarts(
    read_request: Callable[[], RunRequest], policy: RestartPolicy, environment: Mapping[str, str]
) -> int:
    """Run it, and again after a failure; the exit status of the last attempt, or 5 if restarts bring nothing new.

    `read_request` lists the hosts as they are then. LaunchError where the first attempt cannot be started.
    """
    request = read_request()
    prepared = prepare(request, {**environment, "HVDLAUNCH_ATTEMPT": "0"}, Path.cwd())
    printed: set[str] = set()
    _say_new(prepared.plan.remarks, printed)
    first_np = len(prepared.plan.slots)
    min_np = first_np if policy.min_np is None else policy.min_np
    if min_np > first_np:
        raise CommandError(f"--min-np {min_np}: only {first_np} ranks fit: pass a number up to that")
    environment = {**environment, "HVDLAUNCH_JOB": prepared.environment["HVDLAUNCH_JOB"]}
    fleet = Fleet(read_request, request, prepared)
    tally, attempt = Tally(), 0
    while True:
        result = _attempt(prepared, policy, first=attempt == 0)
        np = len(prepared.plan.slots)
        tally = with_attempt(tally, result, np)
        status = final_status(tally, result, np, policy)
        if status is not None:
            if status and not result.stopped:
                fleet.clean(prepared)
            if status == NO_PROGRESS:
                say(
                    f"error: {MAX_RESTARTS_WITHOUT_PROGRESS} restarts in a row made no progress (no new checkpoint): "
                    f"giving up with status {NO_PROGRESS}"
                )
            elif status not in FINAL and not result.stopped:
                say(f"error: all {policy.restarts} restarts are used up (--restarts {policy.restarts})")
            return status
        attempt += 1
        following = fleet.next_run(
            {**environment, "HVDLAUNCH_ATTEMPT": str(attempt)}, min_np=min_np, refused=tally.refused
        )
        if following is None:
            return result.status
        prepared = following
        _say_new(prepared.plan.remarks, printed)
        say(restart_line(prepared, tally, result, policy))


def with_attempt(tally: Tally, result: RunResult, np: int) -> Tally:
    """The tally with one more attempt, of `np` ranks."""
    if result.status == BAD_INPUT:
        return replace(tally, refused=tally.refused | {np})
    if result.status == TAKEN:  # the program has not run; the next attempt takes other GPUs
        return replace(tally, failures=tally.failures + 1)
    steps = [step for step in (tally.checkpoint, result.checkpoint) if step is not None]
    checkpoint = max(steps, default=None)
    return replace(
        tally,
        failures=tally.failures + 1,
        fruitless=0 if checkpoint != tally.checkpoint or not tally.ran else tally.fruitless + 1,
        checkpoint=checkpoint,
        ran=tally.ran | {np},
    )


def final_status(tally: Tally, result: RunResult, np: int, policy: RestartPolicy) -> int | None:
    """The exit status if it is over, None if another attempt follows; `tally` counts this one."""
    if result.stopped or result.status in (0, TOO_MANY_SKIPPED):
        return result.status
    if result.status == BAD_INPUT:  # another number of ranks may be right where this one is new
        return None if tally.ran and np not in tally.ran else BAD_INPUT
    if tally.fruitless >= MAX_RESTARTS_WITHOUT_PROGRESS:
        return NO_PROGRESS
    return result.status if tally.failures > policy.restarts else None


def restart_line(prepared: PreparedRun, tally: Tally, result: RunResult, policy: RestartPolicy) -> str:
    """What failed, how many ranks go on where, and from which step."""
    used = hosts_of(prepared.plan.slots)
    where = to_option(used) if len(used) <= MAX_NAMED else f"{len(used)} hosts"
    ranks = "1 rank" if len(prepared.plan.slots) == 1 else f"{len(prepared.plan.slots)} ranks"
    start = "no checkpoint was saved yet" if tally.checkpoint is None else f"from step {tally.checkpoint}"
    why = result.why or f"status {result.status}"
    return f"warning: restart {tally.failures} of {policy.restarts} after: {why}; {ranks} on {where}, {start}"


def _say_new(remarks: Iterable[str], printed: set[str]) -> None:
    for remark in remarks:
        if remark not in printed:
            say(remark)
        printed.add(remark)


def _attempt(prepared: PreparedRun, policy: RestartPolicy, *, first: bool) -> RunResult:
    try:
        return run(prepared, grace_s=policy.grace_s)
    except ProcessError as error:
        if first:
            raise
        return RunResult(status=1, run_folder=None, why=str(error), stopped=False)
