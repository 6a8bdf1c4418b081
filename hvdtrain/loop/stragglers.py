"""Stragglers: each rank's own time in its steps, and the rank or host with the longest."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hvdtrain.core.finite import rank_range
from hvdtrain.core.phases import Phase, Phases, StepMeans

# Minimum share of their time that the others wait for a straggler.
BEHIND_SHARE = 0.1

# Ranks are compared over at least this number of steps and seconds, and a straggler must be behind twice in a row, so
# that a pause of the machine does not count. With 2 ranks and steps of 20 ms on 2 cores that other jobs shared, one of
# the ranks was more than BEHIND_SHARE behind over 10 steps, every few seconds.
LEAST_STEPS, LEAST_S = 10, 5.0

WAITS: tuple[Phase, ...] = ("bubble", "sync", "record")  # waits for other ranks, and for rank 0's disk


@dataclass(frozen=True, kw_only=True)
class Behind:
    """A straggler: the rank, host or group of ranks that the others wait for."""

    step: int
    host: str  # of its first rank
    rank: int  # its first rank
    ranks: str  # description of all its ranks
    lag_s: float  # how much longer the others waited since the last comparison
    share: float  # of the time since the last comparison


class OwnTime:
    """Wraps the clock of a run's steps, and adds up a rank's own time: the time that it does not wait for others.

    Own time is everything except WAITS: reading, computing, and the host's work in between. On a CPU it is host time.
    On a GPU it is stream time between two events, which are read once the device has passed them, without a
    synchronization. Waits inside layers (--sync-bn, --tensor) count as own time, which hides stragglers.
    """

    def __init__(self, clock: Phases, device: torch.device) -> None:
        """Wrap `clock`, the clock of the run or OFF."""
        self._clock = clock
        self._new_event: Callable[[], torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._new_event = lambda: torch.cuda.Event(enable_timing=True)
        self._began_s: float | None = None  # None while the rank waits, and before its first step
        self._began: torch.cuda.Event | None = None
        self._spans = deque[tuple[torch.cuda.Event, torch.cuda.Event]]()  # the device may not have passed them
        self._free_events: list[torch.cuda.Event] = []
        self._own_s = 0.0

    @property
    def isolated(self) -> bool:
        return self._clock.isolated

    @property
    def uniform_steps(self) -> int:
        return self._clock.uniform_steps

    def enter(self, phase: Phase) -> None:
        is_wait = phase in WAITS
        if self._began_s is not None and (is_wait or self._clock.isolated):
            self._end()
        self._clock.enter(phase)  # if phases are isolated, this waits for all ranks
        if not is_wait and self._began_s is None:
            self._begin()

    def end_step(self) -> None:
        self._clock.end_step()

    def means(self) -> StepMeans | None:
        return self._clock.means()

    def close(self) -> None:
        self._clock.close()

    def restart(self) -> None:
        """Discard the time so far; the next phase starts from zero."""
        self._began_s = self._began = None
        self.pop_s()

    def pop_s(self) -> float:
        """Return the seconds since the last call, as far as the device has passed them."""
        while self._spans and self._spans[0][1].query():
            began, ended = self._spans.popleft()
            self._own_s += began.elapsed_time(ended) / 1000
            self._free_events += [began, ended]
        own_s, self._own_s = self._own_s, 0.0
        return own_s

    def _begin(self) -> None:
        self._began_s = time.perf_counter()
        if self._new_event is not None:
            self._began = self._recorded(self._new_event)

    def _end(self) -> None:
        assert self._began_s is not None
        if self._new_event is None:
            self._own_s += time.perf_counter() - self._began_s
        elif self._began is not None:
            self._spans.append((self._began, self._recorded(self._new_event)))
        self._began_s = self._began = None

    def _recorded(self, new_event: Callable[[], torch.cuda.Event]) -> torch.cuda.Event:
        event = self._free_events.pop() if self._free_events else new_event()
        event.record()
        return event


def find_behind(
    own_s: Sequence[float], hosts: Sequence[str], *, parts: int, step: int, elapsed_s: float
) -> Behind | None:
    """Return the rank with an own time that exceeds the others' by more than BEHIND_SHARE of the elapsed time.

    Its host is reported instead if each of its ranks exceeds the ranks of other hosts. If a replica is split into
    `parts`, a rank is compared only with ranks that hold the same part. The median represents the others.
    """

    def lag_s(rank: int, others: Iterable[int]) -> float:
        peers_s = [own_s[other] for other in others if other % parts == rank % parts]
        return own_s[rank] - median(peers_s) if peers_s else 0.0

    ranks = range(len(own_s))
    lags_s = {rank: lag_s(rank, (other for other in ranks if other != rank)) for rank in ranks}
    slowest = max(lags_s, key=lambda rank: lags_s[rank])
    if lags_s[slowest] <= BEHIND_SHARE * elapsed_s:
        return None
    elsewhere = [rank for rank in ranks if hosts[rank] != hosts[slowest]]
    of_host = {rank: lag_s(rank, elsewhere) for rank in ranks if hosts[rank] == hosts[slowest]}
    late = of_host if min(of_host.values()) > BEHIND_SHARE * elapsed_s else {slowest: lags_s[slowest]}
    first, most_s = min(late), max(late.values())
    is_block = max(late) - first + 1 == len(late)
    return Behind(
        step=step,
        host=hosts[slowest],
        rank=first,
        ranks=rank_range(first, len(late)) if is_block else f"ranks {', '.join(map(str, late))}",
        lag_s=most_s,
        share=most_s / elapsed_s,
    )


class Stragglers:
    """Finds stragglers in the own times of all ranks, report by report."""

    def __init__(self, hosts: Sequence[str], *, parts: int) -> None:
        """Create the detector; `hosts` is indexed by rank, and a replica is split over `parts` ranks."""
        self._hosts, self._parts = hosts, parts
        self._forget()
        self._before: Behind | None = None  # the straggler of the previous comparison
        self._news = News()

    def _forget(self) -> None:
        self._own_s, self._elapsed_s, self._steps = [0.0] * len(self._hosts), 0.0, 0

    def see(self, own_s: Sequence[float], *, step: int, steps: int, elapsed_s: float) -> Behind | None:
        """Add the own times of all ranks over `steps` steps; return a straggler to report, if any."""
        self._own_s = [total + seconds for total, seconds in zip(self._own_s, own_s, strict=True)]
        self._elapsed_s += elapsed_s
        self._steps += steps
        if self._steps < LEAST_STEPS or self._elapsed_s < LEAST_S:
            return None
        behind = find_behind(self._own_s, self._hosts, parts=self._parts, step=step, elapsed_s=self._elapsed_s)
        before, self._before = self._before, behind
        self._forget()
        is_again = behind is not None and before is not None and before.rank == behind.rank
        return self._news.of(behind if is_again else None)


class News:
    """Reports a straggler when it falls behind, and again when it is twice as far behind as last reported."""

    def __init__(self) -> None:
        self._known: Behind | None = None  # last reported straggler, while it stays behind

    def of(self, behind: Behind | None) -> Behind | None:
        """Return the straggler if it should be reported now, else None."""
        known = self._known
        if behind is None or behind.share <= BEHIND_SHARE:
            self._known = None
            return None
        if known is not None and known.rank == behind.rank and behind.share < 2 * known.share:
            return None
        self._known = behind
        return behind
