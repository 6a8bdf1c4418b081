"""Why a run failed: which rank failed first, where it was, and its last output.

A rank of hvdtrain leaves files in the run folder (see traces). Clocks are not compared. Without an error file the
end of the rank's log is used.
"""

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launch.errors import harmless
from launch.hosts.probe import silent_host
from launch.hosts.ssh import NO_CHOICE, SSH, Ssh
from launch.machine.mpi import Parameter
from launch.placement.slots import RankSlot
from launch.run.supervise.launcher_output import LauncherOutput
from launch.run.supervise.rank_logs import Logs, RankReport
from launch.run.supervise.traces.files import Trace, gather_traces, in_calls, in_torch_calls

TAIL_LINES, LINE_CHARS = 12, 500
MAX_NAMED = 4
# Errors that only show that another rank is gone.
SECONDARY = re.compile(r"HorovodInternalError|Horovod has been shut down|MPI_ERR|[Bb]roken pipe|Connection reset")
# Signals by which a launcher or MPI ends the other ranks.
CONSEQUENT = (signal.SIGABRT, signal.SIGTERM)
WATCHDOG = re.compile(r"^Timeout \((?P<after>[\d:]+(\.\d*[1-9])?)0*\)!", re.MULTILINE)  # written by faulthandler
KILLED = ", perhaps out of memory"  # SIGKILL leaves a rank no time to name an error
ERROR = re.compile(r" {4}(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b")  # more lines may follow
LAST_WORDS, STOOD = "; its last words:", "; it stood here:"


def explain(
    status: int,
    output: LauncherOutput,
    slots: Sequence[RankSlot],
    report: RankReport,
    ssh: Ssh = SSH,
    *,
    logs: Logs | None = None,
    parameters: Sequence[Parameter] = (),
) -> tuple[str | None, str | None]:
    """Explain why the run failed, in one line and a rank's last output, and name the host that failed.

    The explanation is None if the program has explained it itself, the host if several failed, or none is known. If the
    launcher itself failed, the line names the `parameters` of Open MPI's files.
    """
    if report.explanation is not None:
        return None, None
    lost, hosts = output.lost or output.gone, {slot.host for slot in slots}
    if lost not in hosts and output.rank is None:  # ssh reports the HostName of ~/.ssh/config, not the host of -H
        lost = silent_host([slot.host for slot in slots], ssh) or lost
    folder = None if report.run_folder is None else Path(report.run_folder) / "ranks"
    if lost in hosts:  # the files at hand: other hosts would take a second, and a restart waits for this
        traces = {} if folder is None else gather_traces(folder, slots, None)
        ranks = [str(slot.rank) for slot in slots if slot.host == lost]
        had = f"it had rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        return f"host {lost} no longer answers; {had}{_calls_of(traces)}", lost
    traces = {} if folder is None else gather_traces(folder, slots, logs)
    rank, calls = first_failed(output, traces), ""
    if rank is None and len(slots) == 1 and logs is not None and logs.end(slots[0]):
        rank = 0  # prterun does not name the only one
    if report.run_folder is None and logs is not None:
        in_torch = in_torch_calls(slots, logs, is_likely=output.signal == signal.SIGABRT)  # by torch's watchdog
        calls = "" if in_torch is None else f"; {in_torch}"
    if rank is None or rank >= len(slots):
        obeyed = ", ".join(str(each) for each in parameters if each.in_file and not each.value.startswith(NO_CHOICE))
        return f"the launcher exited with status {status}{f'. It obeys {obeyed}' if obeyed else ''}{calls}", None
    if (trace := traces.get(rank)) is not None and (fired := WATCHDOG.search(trace.words)) is not None:
        return _hung(rank, fired["after"], slots, traces)
    if output.signal is None and trace is not None and not trace.words:
        calls = _calls_of(traces)
    if logs is not None and (trace is None or not trace.words) and (end := logs.end(slots[rank])):
        nowhere = Trace(at=None, waited=False, read=False, words="", file=logs.file(rank))
        trace = replace(trace or nowhere, words=end, file=logs.file(rank))
    how = (output.how if rank == output.rank else None) or f"ended the run with status {status}"
    if rank == output.rank and output.signal == signal.SIGKILL:
        how += KILLED + ("," if trace and trace.at else "")
    return _with_tail(f"{_named(rank, slots)} {how}", trace, calls), slots[rank].host


def summary_line(explanation: str) -> str:
    """Return the first line of an explanation, with the rank's last line of output if that names the error.

    The last line of an explanation is the name of the rank's file.
    """
    line, *lines = explanation.splitlines() or [""]
    if line.endswith(LAST_WORDS):
        line = line.removesuffix(LAST_WORDS)
        named = list(filter(ERROR.match, lines[:-1])) or lines[:-1]
        return line if KILLED in line else f"{line}: {named[-1].strip()}"
    return line.removesuffix(STOOD)


def first_failed(output: LauncherOutput, traces: Mapping[int, Trace]) -> int | None:
    """Return the rank that failed by itself; of several the one that mpirun names, else the lowest.

    A working rank has a shorter time limit than a waiting rank: if the watchdog of a waiting rank fired first, the
    working rank was stopped.
    """
    if output.signal is not None and output.signal not in CONSEQUENT:
        return output.rank
    fired = [rank for rank, trace in traces.items() if WATCHDOG.search(trace.words)]
    with_words = [rank for rank, trace in traces.items() if trace.words]
    primary = [rank for rank in with_words if rank not in fired and not SECONDARY.search(traces[rank].words)]
    busy = [rank for rank in fired if not traces[rank].waited]
    known = [] if output.rank is None else [output.rank]
    first = [rank for rank in fired if rank in known]
    for ranks in (primary, first, busy, fired, known, with_words):
        if ranks:
            return output.rank if output.rank in ranks else min(ranks)
    return None


def all_named(ranks: Collection[int], slots: Sequence[RankSlot]) -> str:
    """List ranks with their hosts; a long list is shortened."""
    names = [_named(rank, slots) for rank in ranks]
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return ", ".join(names[:MAX_NAMED] + more)


def _hung(rank: int, after: str, slots: Sequence[RankSlot], traces: Mapping[int, Trace]) -> tuple[str, str | None]:
    """Explain why this rank's watchdog fired: it hung itself, or other ranks did not join its collective; and where."""
    trace = traces[rank]
    at = f" {trace.at}" if trace.at else ""
    if not trace.waited:
        line = _with_tail(f"{_named(rank, slots)} hung", trace, f": no progress for {after}{_calls_of(traces)}")
        return line, slots[rank].host
    unknown = [other for other in range(len(slots)) if other not in traces or traces[other].at is None]
    if late := [other for other, left in traces.items() if left.at and not left.waited] or unknown:
        many = "they hang, were stopped, or their hosts are silent"
        why = "it hangs, was stopped, or its host is silent" if len(late) == 1 else many
        reading = "while reading: " if all(other in traces and traces[other].read for other in late) else ""
        first, *others = {slots[other].host for other in late}
        line = f"{all_named(late, slots)} did not arrive{at} ({reading}{why}){_calls_of(traces)}"
        return line, None if others else first
    if calls := in_calls(traces):
        return f"deadlock, no progress for {after}: {calls}", None
    why = f": no progress for {after}; they may be in different collectives, or one was stopped"
    return _with_tail(f"deadlock: all ranks are waiting in a collective, {_named(rank, slots)}", trace, why), None


def _with_tail(line: str, trace: Trace | None, more: str = "") -> str:
    """Append the rank's place and the end of its output, or the position of its main thread."""
    if trace is None:
        return line + more
    line = f"{line} {trace.at}{more}" if trace.at else line + more
    if not trace.words:
        return line
    stack = trace.stack()
    tail = trace.words.splitlines()[-TAIL_LINES:] if stack is None else stack[:TAIL_LINES]
    shown = (f"    {harmless(text.expandtabs()[:LINE_CHARS])}" for text in tail)
    return "\n".join([line + (LAST_WORDS if stack is None else STOOD), *shown, f"    {trace.file}"])


def _calls_of(traces: Mapping[int, Trace]) -> str:
    """Return in which calls the ranks are, for the end of a line."""
    calls = in_calls(traces)
    return "" if calls is None else f"; {calls}"


def _named(rank: int, slots: Sequence[RankSlot]) -> str:
    return f"rank {rank} on {slots[rank].host}"
