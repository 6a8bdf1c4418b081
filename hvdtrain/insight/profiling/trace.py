"""The phases as ranges in traces: torch.profiler's, for Perfetto and TensorBoard, and those of Nsight Systems."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hvdtrain.core.phases import Phase, Phases, StepMeans
from hvdtrain.insight.profiling.clocks import WARMUP_STEPS
from hvdtrain.settings.safety.exits import print_message

_UNTRACED_STEPS = 1
_DISCARDED_STEPS = 2  # traced and discarded: starting the profiler costs time
BEFORE_STEPS = _UNTRACED_STEPS + _DISCARDED_STEPS


def unmeasured_steps(traced_steps: int | None) -> int:
    """Return how many first steps are slower, which includes traced ones and a last one that waits for the files."""
    return WARMUP_STEPS if traced_steps is None else BEFORE_STEPS + traced_steps + 1


class PhaseRanges:
    """Measures phases with another clock, and keeps a range open during each."""

    def __init__(self, phases: Phases, new_range: Callable[[Phase], AbstractContextManager[object]]) -> None:
        self._phases, self._new_range, self._open_range = phases, new_range, ExitStack()

    @property
    def isolated(self) -> bool:
        return self._phases.isolated

    @property
    def uniform_steps(self) -> int:
        return self._phases.uniform_steps

    def enter(self, phase: Phase) -> None:
        self._phases.enter(phase)
        self._open_range.close()
        self._open_range.enter_context(self._new_range(phase))

    def end_step(self) -> None:
        self._phases.end_step()
        self._open_range.close()

    def means(self) -> StepMeans | None:
        return self._phases.means()

    def close(self) -> None:
        self._phases.close()
        self._open_range.close()


def is_run_by_nsight() -> bool:
    """Return whether this process was started by Nsight Systems."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


class TorchTrace(PhaseRanges):
    """Measures phases, and traces `steps` steps into `file`, after the first BEFORE_STEPS.

    Every rank traces, since a single tracing rank would keep the others waiting. The ranks need different times to
    write, so `phases` should start to measure after `unmeasured_steps`. If a trace cannot be written, a line on stderr
    reports it and training continues.
    """

    def __init__(self, phases: Phases, file: Path, *, steps: int, device: torch.device) -> None:
        super().__init__(phases, lambda phase: record_function(phase) if self._steps_left else nullcontext())
        self._file = file
        self._steps_left = BEFORE_STEPS + steps
        if device.type != "cuda":  # otherwise the profiler reports the missing GPU as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=_UNTRACED_STEPS, warmup=_DISCARDED_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # without it torch warns that there is only one cycle
        )
        self._profiler.start()

    def end_step(self) -> None:
        super().end_step()
        if self._steps_left:
            self._profiler.step()
            self._steps_left -= 1
            if not self._steps_left:
                self._profiler.stop()

    def close(self) -> None:
        """Write the steps traced so far, if the run was shorter than planned."""
        super().close()
        if self._steps_left:
            self._steps_left = 0
            self._profiler.stop()

    def _write(self, profiler: "profile") -> None:
        part_file = self._file.with_name(f"part-{self._file.name}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part_file))
            part_file.replace(self._file)
        except (OSError, RuntimeError) as error:
            print_message("warning", f"{self._file}: the trace could not be written ({error}); training continues")
