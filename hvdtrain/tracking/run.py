"""A run while it is open: what must be in place before its first collective, what must be written at its end."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch

from hvdtrain.profiling import picture
from hvdtrain.profiling.gains import Summed
from hvdtrain.profiling.phases import Phases
from hvdtrain.profiling.profile import over_ranks
from hvdtrain.profiling.traffic import sent_bytes
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.comm import Comm, losses
from hvdtrain.safety import exits, watchdog
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.safety.faults import Faults
from hvdtrain.safety.watchdog import Watchdog
from hvdtrain.tracking import events, peaks
from hvdtrain.tracking.console import Console
from hvdtrain.tracking.environment import environment
from hvdtrain.tracking.opening import opening, too_few_steps
from hvdtrain.tracking.placement import planned
from hvdtrain.tracking.tracker import Measures, Tracker


class Run:
    """One rank's record of a run; made by `opened`, all ranks call its methods together."""

    tracker: Tracker  # since `begin`
    device: torch.device
    leave: Event  # set when this rank was asked to save and leave
    concluded = False

    def __init__(self, comm: Comm, folder: Path, watch: Watchdog, faults: Faults) -> None:
        self.folder = folder
        self.watch = watch
        self.faults = faults
        self.console = Console(shown=comm.rank == 0)
        self._comm = comm
        self._summed: Summed | None = None
        self._rank = comm.rank  # names this rank's files, also where it becomes another

    def begin(
        self,
        settings: Mapping[str, Any],
        derived: Mapping[str, Any],
        *,
        device: torch.device,
        columns: Sequence[str],
        measures: Measures,
        memory: Mapping[str, Any] | None,
    ) -> None:
        """Write and say what is known before the first step; from now on a rank that ends early leaves a result.

        `columns` names the settings, and what was derived from them, for TensorBoard's HPARAMS page; `memory` is that
        of the tracker in the checkpoint that the run goes on from. In the end every rank obeys SIGUSR1, and hvdlaunch
        knows it.
        """
        comm, known, self.device = self._comm, {**settings, **derived}, device
        facts = rank_facts(comm, device)
        placement = [{"rank": rank, **theirs} for rank, theirs in enumerate(comm.allgather(facts))]
        result = {
            "np": comm.size,
            "hosts": sorted({theirs["host"] for theirs in placement}),
            **{name: known[name] for name in ("model", "data", "recipe", "epochs", "global_batch")},
            "logs": os.environ.get("HVDLAUNCH_LOGS"),
        }
        counts = ("lost_ranks", "joined_ranks", "recoveries") if settings.get("elastic") else ()
        self.tracker = Tracker(
            self.folder, writes=comm.rank == 0, measures=measures, result=result, counts=counts, memory=memory
        )
        self.tracker.rank_facts(comm.rank, **facts)
        if comm.rank == 0:
            found = environment()
            self.tracker.describe(
                columns=events.columns({"ranks": comm.size, **{name: known[name] for name in columns}}),
                command=found["command"],
                config={**settings, "derived": derived},
                environment=found,
                placement={"ranks": placement, "plan": planned(os.environ.get("HVDLAUNCH_PLAN"))},
            )
        errors = self.folder / "ranks" / f"rank-{comm.rank}.err"
        self.leave = exits.on_early_end(errors, self.tracker.conclude, step=lambda: self.watch.step)
        if "gradient_bytes" in known:
            self._summed = Summed(**{name: known[name] for name in ("gradient_bytes", "sync", "compression")})
        comm.allgather("ready")
        self._began = self.tracker.result["steps"], sent_bytes()
        if comm.rank == 0:
            exits.report(saves="yes")
        self.console.say(*opening(known, placement, unit=measures.unit, folder=self.folder), *too_few_steps(known))
        self.faults.at("start")

    def lead(self) -> None:
        """Write and say from now on what rank 0 has written and said, which is lost."""
        self.tracker.lead()
        self.console.show()
        exits.lead()

    def profile(self, phases: Phases, *, last: bool = False) -> None:
        """What the clocks of all ranks have measured so far; the `last` time with a picture and the verdict."""
        (first, before), now = self._began, sent_bytes()
        sent = None if before is None or now is None else (now - before) / max(1, self.tracker.result["steps"] - first)
        remedies = self.tracker.measures.remedies
        profile = over_ranks(self._comm, phases, remedies, summed=self._summed, sent_bytes=sent)
        if profile is None:
            return
        self.tracker.result["profile"] = profile.summary()
        self.tracker.document("phases.json", profile.document())
        if last and self._comm.rank == 0:
            self.tracker.picture("phases", picture.draw(profile), self.tracker.result["steps"])
            self.tracker.text("phases", "\n".join(profile.lines()))
            self.console.say(*profile.lines())

    def conclude(self, line: str, *, weights_sha256: str) -> None:
        """The run has done all its epochs: each rank's last facts, the result, and the last line."""
        self.console.close()
        self.tracker.rank_facts(self._rank, weights_sha256=weights_sha256)
        self.end(exits.FINISHED)
        if self._comm.rank == 0:
            ranks = f"{self._comm.size} rank{'s' if self._comm.size > 1 else ''}"
            result, measures = self.tracker.result, self.tracker.measures
            speed = f"{result[measures.train_per_s]:.0f} {measures.unit}/s"
            print(
                f"finished: {line} after {result['epochs']} epochs on {ranks}, {result['wall_time_s']:.0f} s, {speed}; "
                f"{self.folder}",
                flush=True,
            )
        self.concluded = True

    def end(self, reason: str) -> None:
        """Write the result, with the most memory that the ranks have held; each rank's own is in its file."""
        mine = peaks.of_process(self.device)
        self.tracker.rank_facts(self._rank, memory=mine)
        self.tracker.result["memory"] = peaks.highest(self._comm.allgather(mine))
        self.tracker.conclude(reason)


@contextmanager
def opened(
    comm: Comm, folder: Path, *, hang_timeout_s: float | None, timeline: bool, elastic: bool = False
) -> Iterator[Run]:
    """Start the watchdog and then Horovod, with `timeline` in the run folder; at the end write why the run ended.

    The watchdog comes before the first collective, the faults to inject before anything can fail, and nothing is closed
    where a rank fails: its hook writes the last words then. The ranks of an `elastic` run outlive one whose watchdog
    ends it.
    """
    watch = watchdog.watch(folder, comm.rank, hang_timeout_s=hang_timeout_s, by_signal=elastic)
    watch.starting()
    comm.waiting = watch.collective
    faults = agreed(comm, lambda: Faults.parse(os.environ, comm.rank))
    if comm.rank == 0 and faults.announcement:
        print(faults.announcement, file=sys.stderr, flush=True)
    comm.start(timeline=folder / "timeline.json" if timeline else None)
    run = Run(comm, folder, watch, faults)
    lost = losses() if elastic else ()
    try:
        yield run
    except EndOfRun as end:
        run.console.close()
        try:
            run.end(end.reason)
        except lost:  # a rank that dies now is no news
            run.tracker.conclude(end.reason)
        watch.close()
        raise
    watch.close()


def rank_facts(comm: Comm, device: torch.device) -> dict[str, Any]:
    """Where this rank runs, and on what."""
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
