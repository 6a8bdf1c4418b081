"""Why a run failed: which rank failed first, where it was, and its last output.

A rank of hvdtrain leaves two files in the run folder: its errors in `ranks/rank-<r>.err`, and its place in
`ranks/rank-<r>.at`, a single line such as "step 17 working", "step 17 reading" while it reads its data, or "step 17
waiting" inside a collective. Clocks are not compared. Without an error file the end of the rank's log is used.
"""

import itertools
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import harmless
from launch.files import MAX_MIB, open_regular
from launch.machine.mpi import Parameter
from launch.placement.slots import RankSlot
from launch.probe.hosts import silent_host
from launch.probe.ssh import NO_CHOICE, SSH, Ssh
from launch.supervise.launcher_output import LauncherOutput
from launch.supervise.rank_logs import Logs, Report

TAIL_LINES, LINE_CHARS = 12, 500
MAX_NAMED = 4
# Errors that only show that another rank is gone.
SECONDARY = re.compile(r"HorovodInternalError|Horovod has been shut down|MPI_ERR|[Bb]roken pipe|Connection reset")
# Signals by which a launcher or MPI ends the other ranks.
CONSEQUENT = (signal.SIGABRT, signal.SIGTERM)
AT = re.compile(r"(?:step (?P<step>\d+)|start) (?P<doing>[a-z]+)\s*")
WATCHDOG = re.compile(r"^Timeout \((?P<after>[\d:]+(\.\d*[1-9])?)0*\)!", re.MULTILINE)  # written by faulthandler
STACK = "(most recent call first):"  # also written by faulthandler
LAST_WORDS, STOOD = "; its last words:", "; it stood here:"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The files that a rank has left in the run folder."""

    at: str | None  # "at step 17"; None if unknown
    waited: bool  # whether it waited for other ranks, inside a collective
    read: bool  # whether it was reading its data
    words: str  # content of that file; may be empty
    file: Path  # its error file, or else its log


def explain(
    status: int,
    output: LauncherOutput,
    slots: Sequence[RankSlot],
    report: Report,
    ssh: Ssh = SSH,
    *,
    logs: Logs | None = None,
    parameters: Sequence[Parameter] = (),
) -> str | None:
    """Explain why the run failed, in one line and a rank's last output; None if the program has explained it itself.

    If the launcher itself failed, the line names the `parameters` of Open MPI's files.
    """
    if report.explanation is not None:
        return None
    lost, hosts = output.lost or output.gone, {slot.host for slot in slots}
    if lost not in hosts and output.rank is None:  # ssh reports the HostName of ~/.ssh/config, not the host of -H
        lost = silent_host([slot.host for slot in slots], ssh) or lost
    if lost in hosts:
        ranks = [str(slot.rank) for slot in slots if slot.host == lost]
        return f"host {lost} no longer answers; it had rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    traces = {} if report.run_folder is None else read_traces(Path(report.run_folder) / "ranks", len(slots))
    rank = first_failed(output, traces)
    if rank is None or rank >= len(slots):
        obeyed = ", ".join(str(each) for each in parameters if each.in_file and not each.value.startswith(NO_CHOICE))
        return f"the launcher exited with status {status}{f'. It obeys {obeyed}' if obeyed else ''}"
    if (trace := traces.get(rank)) is not None and (fired := WATCHDOG.search(trace.words)) is not None:
        return _hung(rank, fired["after"], slots, traces)
    if logs is not None and (trace is None or not trace.words) and (end := logs.end(slots[rank])):
        nowhere = Trace(at=None, waited=False, read=False, words="", file=logs.file(rank))
        trace = replace(trace or nowhere, words=end, file=logs.file(rank))
    how = (output.how if rank == output.rank else None) or f"ended the run with status {status}"
    if rank == output.rank and output.signal == signal.SIGKILL:
        how += ", perhaps out of memory" + ("," if trace and trace.at else "")
    return _with_tail(f"{_named(rank, slots)} {how}", trace)


def summary_line(explanation: str) -> str:
    """Return the first line of an explanation, with the rank's last line of output, which names the error.

    The last line of an explanation is the name of the rank's file.
    """
    line, *lines = explanation.splitlines() or [""]
    if line.endswith(LAST_WORDS):
        return f"{line.removesuffix(LAST_WORDS)}: {lines[-2].strip()}"
    return line.removesuffix(STOOD)


def read_traces(folder: Path, ranks: int) -> dict[int, Trace]:
    """Read what the ranks have left in the folder, by rank; ranks without files are missing."""
    traces = {}
    for rank in range(ranks):
        file = folder / f"rank-{rank}.err"
        text, at = _text(file).strip(), AT.match(_text(file.with_suffix(".at")))
        if text or at:
            doing, place = (None, None) if at is None else (at["doing"], _place(at))
            traces[rank] = Trace(at=place, waited=doing == "waiting", read=doing == "reading", words=text, file=file)
    return traces


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


def _hung(rank: int, after: str, slots: Sequence[RankSlot], traces: Mapping[int, Trace]) -> str:
    """Explain why this rank's watchdog fired: it hung itself, or other ranks did not join its collective."""
    trace = traces[rank]
    at = f" {trace.at}" if trace.at else ""
    if not trace.waited:
        return _with_tail(f"{_named(rank, slots)} hung", trace, f": no progress for {after}")
    unknown = [other for other in range(len(slots)) if other not in traces or traces[other].at is None]
    if late := [other for other, left in traces.items() if left.at and not left.waited] or unknown:
        many = "they hang, were stopped, or their hosts are silent"
        why = "it hangs, was stopped, or its host is silent" if len(late) == 1 else many
        reading = "while reading: " if all(other in traces and traces[other].read for other in late) else ""
        return f"{all_named(late, slots)} did not arrive{at} ({reading}{why})"
    why = f": no progress for {after}; they may be in different collectives, or one was stopped"
    return _with_tail(f"deadlock: all ranks are waiting in a collective, {_named(rank, slots)}", trace, why)


def _with_tail(line: str, trace: Trace | None, more: str = "") -> str:
    """Append the rank's place and the end of its output, or the position of its main thread."""
    if trace is None:
        return line + more
    line = f"{line} {trace.at}{more}" if trace.at else line + more
    if not trace.words:
        return line
    lines = trace.words.splitlines()
    stacks = [number for number, text in enumerate(lines) if text.endswith(STACK)]
    if stacks:  # the main thread's stack is the last; a crash marks its own
        first = next((number for number in stacks if lines[number].startswith("Current thread")), stacks[-1])
        tail = list(itertools.takewhile(str.strip, lines[first + 1 :]))[:TAIL_LINES]
    else:
        tail = lines[-TAIL_LINES:]
    shown = (f"    {harmless(text.expandtabs()[:LINE_CHARS])}" for text in tail)
    return "\n".join([line + (STOOD if stacks else LAST_WORDS), *shown, f"    {trace.file}"])


def _place(at: re.Match[str]) -> str:
    doing = "" if at["doing"] in ("working", "waiting", "left") else f" while {at['doing']}"
    return ("at the start" if at["step"] is None else f"at step {at['step']}") + doing


def _named(rank: int, slots: Sequence[RankSlot]) -> str:
    return f"rank {rank} on {slots[rank].host}"


def _text(file: Path) -> str:
    try:
        with open_regular(file) as stream:
            return stream.read(MAX_MIB << 20).decode(errors="replace")
    except OSError:
        return ""
