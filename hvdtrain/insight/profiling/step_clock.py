"""The clock of a run's steps."""

from pathlib import Path

import torch

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.insight.profiling.passes import make_clock
from hvdtrain.insight.profiling.settings import ProfileSettings
from hvdtrain.insight.profiling.trace import PhaseRanges, TorchTrace, is_run_by_nsight, unmeasured_steps
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.watchdog import Watchdog


def step_clock(
    settings: ProfileSettings, folder: Path, comm: Comm, device: torch.device, *, watchdog: Watchdog, readers: int
) -> Phases:
    """Return the clock that measures this rank's phases and shows them in traces, as configured.

    `readers` is the number of processes that prefetch for this rank.
    """

    def barrier() -> None:
        comm.allgather(None)
        if watchdog.step is not None:
            watchdog.begin_step(watchdog.step)  # each phase has the full limit, so that only the late rank exceeds it

    if settings.profile == "exact":
        readers = max(comm.allgather(readers))
    unmeasured = unmeasured_steps(settings.torch_profile)
    phases = make_clock(settings.profile, device, barrier, unmeasured_steps=unmeasured, readers=readers)
    if device.type == "cuda" and (phases is not OFF or is_run_by_nsight()):
        phases = PhaseRanges(phases, torch.cuda.nvtx.range)  # without Nsight, a range costs almost nothing
    if settings.torch_profile is None:
        return phases
    trace = folder / "profile" / f"rank-{comm.rank}.pt.trace.json.gz"
    return TorchTrace(phases, trace, steps=settings.torch_profile, device=device)
