"""Streams and events: who waits for whom, for torch's race detector. A simulated device takes no time."""

import time
from typing import TYPE_CHECKING, Any

from tests.simgpu.simulator.tensor import CUDA

if TYPE_CHECKING:
    from tests.simgpu.simulator.gpu import Gpu


class Stream:
    """torch.cuda.Stream; also the context in which it is the current one."""

    device = CUDA

    def __init__(self, gpu: "Gpu", number: int) -> None:
        self._gpu, self.cuda_stream = gpu, number
        self.stream_id = number
        gpu.order._handle_stream_creation(number)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.wait_for(self, "Stream.synchronize")

    def __enter__(self) -> "Stream":
        self._gpu.streams.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._gpu.streams.pop()


class Event:
    """torch.cuda.Event."""

    def __init__(self, gpu: "Gpu", *, number: int | None = None) -> None:
        self._gpu = gpu
        self._number = next(gpu.event_numbers) if number is None else number
        self.is_recorded = False
        gpu.order._handle_event_creation(self._number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._gpu.stream
        self.is_recorded = True
        self._at_s = time.perf_counter()
        self._gpu.order._handle_event_record(self._number, stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        if self.is_recorded:
            self._gpu.order._handle_event_wait(self._number, (stream or self._gpu.stream).cuda_stream)

    def query(self) -> bool:
        return True

    @property
    def is_known(self) -> bool:
        """Whether the host has waited for what this event follows, so that to wait for it takes no time."""
        known: dict[int, int] = self._gpu.order.syncs.host_sync_state
        recorded: dict[int, int] = self._gpu.order.syncs.recorded_sync_states[self._number]
        return all(known.get(stream, -1) >= sequence for stream, sequence in recorded.items())

    def synchronize(self) -> None:
        if self.is_recorded:
            self._gpu.note_wait("Event.synchronize")
            self._gpu.order._handle_event_synchronization(self._number)

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds, of the host."""
        return 1e3 * (end_event._at_s - self._at_s)
