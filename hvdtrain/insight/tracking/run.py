"""The record of a running run: set up before its first collective, completed at its end."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch

from hvdtrain.core.task import Task
from hvdtrain.insight.tracking import gauges
from hvdtrain.insight.tracking.console import Console
from hvdtrain.insight.tracking.environment import environment, read_plan
from hvdtrain.insight.tracking.imports import report_imports
from hvdtrain.insight.tracking.opening import opening_lines, warn_of_few_steps
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety import calls, exits, output, watchdog
from hvdtrain.settings.safety.exits import BadInput, EndOfRun
from hvdtrain.settings.safety.faults import Faults
from hvdtrain.settings.safety.watchdog import Watchdog


class TrackedRun:
    """One rank's record of a run, made by `open_run`; its methods are collectives."""

    tracker: Tracker  # set by `start`
    device: torch.device
    stop_requested: Event  # set when this rank receives a stop request
    is_concluded = False

    def __init__(self, comm: Comm, folder: Path, watch: Watchdog, faults: Faults) -> None:
        self.folder = folder
        self.watch = watch
        self.faults = faults
        self.console = Console(is_shown=comm.rank == 0)
        self.comm = comm

    def start(
        self,
        settings: Mapping[str, Any],
        derived: Mapping[str, Any],
        *,
        device: torch.device,
        columns: Sequence[str],
        task: Task,
        memory: Mapping[str, Any] | None,
    ) -> None:
        """Write and print what is known before the first step; from now on a rank that ends early leaves a result.

        `columns` names the settings, and derived values, for TensorBoard's HPARAMS page; `memory` is the tracker's
        state in the checkpoint from which the run resumes. At the end every rank handles SIGUSR1, and hvdlaunch is
        informed.
        """
        comm, known, self.device = self.comm, {**settings, **derived}, device
        facts = rank_facts(comm, device)
        placement = [{"rank": rank, **process} for rank, process in enumerate(comm.allgather(facts))]
        result = {
            "np": comm.size,
            "hosts": sorted({process["host"] for process in placement}),
            **{name: known[name] for name in ("model", "data", "recipe", "epochs", "global_batch")},
            "logs": fact(os.environ, "logs", "") or None,
        }
        self.tracker = Tracker(self.folder, is_writer=comm.rank == 0, task=task, result=result, memory=memory)
        self.tracker.write_rank_facts(comm.rank, **facts)
        output.on_loss(lambda line: self.tracker.write_rank_facts(comm.rank, lost_output=line))
        if comm.rank == 0:
            software = environment()
            self.tracker.describe(
                settings={"ranks": comm.size, **{name: known[name] for name in columns}},
                command=software["command"],
                config={**settings, "derived": derived},
                environment=software,
                placement={"ranks": placement, "plan": read_plan(os.environ.get("HVDLAUNCH_PLAN"))},
            )
        errors = self.folder / "ranks" / f"rank-{comm.rank}.err"
        self.stop_requested = exits.install_stop_handlers(errors, self.tracker.conclude, step=lambda: self.watch.step)
        comm.allgather("ready")
        if attempt := fact(os.environ, "restart", 0):
            event = {"event": "restarted", "step": self.tracker.result["steps"], "attempt": attempt, "np": comm.size}
            self.tracker.record_event(event, {"restarts": attempt})
        if comm.rank == 0:
            exits.report(saves="yes")
            report_imports()
        self.console.print(*opening_lines(known, placement, unit=task.unit, folder=self.folder))
        warn_of_few_steps(known, self.console)
        self.faults.inflict_at("start")

    def end(self, reason: str, **facts: Any) -> None:
        """Write the result with the ranks' peak memory; each rank's peak and last facts are in its file."""
        peak_mib = gauges.process_peaks(self.device)
        self.tracker.write_rank_facts(self.comm.rank, memory=peak_mib, **facts)
        self.tracker.result["memory"] = gauges.highest_peaks(self.comm.allgather(peak_mib))
        self.tracker.conclude(reason)


@contextmanager
def open_run(
    comm: Comm,
    folder: Path,
    *,
    hang_timeout_s: float | None,
    min_limit_s: float = watchdog.MIN_LIMIT_S,
    timeline: bool,
) -> Iterator[TrackedRun]:
    """Start the watchdog and then Horovod, with `timeline` in the run folder; at the end write why the run ended.

    The watchdog starts before the first collective, and faults are set up before anything can fail. If a rank fails,
    nothing is closed: its hook writes the traceback then.
    """
    watch = watchdog.OFF
    if hang_timeout_s != 0:
        watch = watchdog.RankWatchdog(folder, comm.rank, hang_timeout_s=hang_timeout_s, min_limit_s=min_limit_s)
    if comm.size > 1:
        calls.keep_in(folder, comm.rank, watch.is_overdue)
    comm.wait_context = watch.collective
    faults = agree(comm, lambda: Faults.parse(os.environ, comm.rank))
    if comm.rank == 0 and faults.announcement:
        exits.print_message("warning", faults.announcement)
    comm.start(timeline=folder / "timeline.json" if timeline else None)
    run = TrackedRun(comm, folder, watch, faults)
    try:
        yield run
    except EndOfRun as end:
        run.end(end.reason)
        watch.close()
        raise
    except SystemExit as leaving:  # by the program itself
        if leaving.code not in (None, 0) and hasattr(run, "tracker"):
            run.tracker.conclude("failed")
        raise
    except BadInput as error:
        if hasattr(run, "tracker"):
            run.tracker.conclude("failed")
            if comm.size > 1 and not error.is_agreed:
                exits.leave_training(comm.rank, error)
        raise
    watch.close()


def rank_facts(comm: Comm, device: torch.device) -> dict[str, Any]:
    """Return where this rank runs, and its hardware and software."""
    return {
        "host": socket.gethostname(),
        "local_rank": comm.local_rank,
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else os.uname().machine,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
