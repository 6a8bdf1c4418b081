"""The phases as ranges in traces: torch.profiler's, for Perfetto and TensorBoard, and those of Nsight Systems."""

import os
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from hvdtrain.core.phases import Phase, Phases, StepMeans
from hvdtrain.safety.exits import print_message

_UNTRACED_STEPS = 1
_WARMUP_STEPS = 2  # traced and discarded: starting the profiler costs time
BEFORE_STEPS = _UNTRACED_STEPS + _WARMUP_STEPS


def unmeasured_steps(steps: int) -> int:
    """Return how many steps are slower if `steps` are traced; the last of them waits for every rank's file."""
    return BEFORE_STEPS + steps + 1


class _PhaseRanges(ABC):
    """Measures phases with another clock, and keeps a range open for each, by `_begin` and `_end`."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    @property
    def isolated(self) -> bool:
        return self._phases.isolated

    @property
    def uniform_steps(self) -> int:
        return self._phases.uniform_steps

    def enter(self, phase: Phase) -> None:
        self._phases.enter(phase)
        self._end()
        self._begin(phase)

    def end_step(self) -> None:
        self._phases.end_step()
        self._end()

    def means(self) -> StepMeans | None:
        return self._phases.means()

    def close(self) -> None:
        self._phases.close()
        self._end()

    @abstractmethod
    def _begin(self, phase: Phase) -> None: ...

    @abstractmethod
    def _end(self) -> None:
        """Close the open range, if any."""


class NvtxRanges(_PhaseRanges):
    """Shows phases as ranges in Nsight Systems; without Nsight, a range costs almost nothing."""

    def __init__(self, phases: Phases) -> None:
        super().__init__(phases)
        self._is_open = False

    def _begin(self, phase: Phase) -> None:
        torch.cuda.nvtx.range_push(phase)
        self._is_open = True

    def _end(self) -> None:
        if self._is_open:
            torch.cuda.nvtx.range_pop()
            self._is_open = False


def is_run_by_nsight() -> bool:
    """Return whether this process was started by Nsight Systems."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


class TorchTrace(_PhaseRanges):
    """Measures phases, and traces `steps` steps into `file`, after the first BEFORE_STEPS.

    Every rank traces, since a single tracing rank would keep the others waiting. The ranks need different times to
    write, so `phases` should start to measure after `unmeasured_steps`. If a trace cannot be written, a line on stderr
    reports it and training continues.
    """

    def __init__(self, phases: Phases, file: Path, *, steps: int, device: torch.device) -> None:
        super().__init__(phases)
        self._file = file
        self._steps_left = BEFORE_STEPS + steps
        if device.type != "cuda":  # otherwise the profiler reports the missing GPU as an error
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=_UNTRACED_STEPS, warmup=_WARMUP_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # without it torch warns that there is only one cycle
        )
        self._range: record_function | None = None
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

    def _begin(self, phase: Phase) -> None:
        if self._steps_left:
            self._range = record_function(phase)
            self._range.__enter__()

    def _end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self, profiler: "profile") -> None:
        part_file = self._file.with_name(f"part-{self._file.name}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part_file))
            part_file.replace(self._file)
        except (OSError, RuntimeError) as error:
            print_message("warning", f"{self._file}: the trace could not be written ({error}); training continues")
