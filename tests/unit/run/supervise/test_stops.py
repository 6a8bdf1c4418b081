import json
import signal
from types import SimpleNamespace

import pytest

from launch.run.supervise import stops
from launch.run.supervise.stops import SAME_S, STOP_S, Stops

GRACE_S = 60.0


class Stopping:
    """Signals to this process, each some seconds after the one before, and those that mpirun gets."""

    def __init__(self, file, *, saves):
        self.passed_on, self.handed_on, self.now = [], [], 100.0
        self.stops, self._file = Stops(grace_s=GRACE_S), file
        file.write_text(json.dumps({"saves": "yes" if saves else "no"}))

    def is_over(self, after_s, *numbers):
        """Whether the run is to be ended so long after the signals before, once these have come."""
        self.now += after_s
        for number in numbers:
            signal.raise_signal(number)
        launcher = SimpleNamespace(signal=self.passed_on.append)
        self.stops.pass_on(launcher, self._file, lambda: self.handed_on.append(signal.SIGUSR1))
        return self.stops.overdue()


@pytest.fixture(params=[True, False], ids=["saves", "cannot save"])
def stopping(request, monkeypatch, tmp_path):
    made = Stopping(tmp_path / "report.json", saves=request.param)
    monkeypatch.setattr(stops, "time", SimpleNamespace(monotonic=lambda: made.now))
    with made.stops:
        yield made


def test_two_signals_at_once_are_one_and_a_later_one_ends_it_now(stopping):
    assert not stopping.is_over(0, signal.SIGTERM)
    assert not stopping.is_over(SAME_S / 2, signal.SIGTERM)
    assert not stopping.is_over(2 * SAME_S, signal.SIGUSR1)  # which asks for no end
    assert stopping.is_over(2 * SAME_S, signal.SIGHUP)
    assert len(stopping.passed_on) == 1
    assert stopping.stops.by == signal.SIGTERM


def test_a_signal_after_the_end_of_the_launcher_stops_the_run_too(stopping):
    saves = stopping.is_over(0, signal.SIGUSR1) or stopping.stops.saving
    stopping.stops.by = None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
        stopping.stops.take_late(saves=saves)
    assert stopping.stops.by == (signal.SIGUSR1 if saves else signal.SIGTERM)
    assert len(stopping.passed_on + stopping.handed_on) == 1


def test_only_a_program_that_can_save_has_the_whole_time_of_grace(stopping):
    saves = stopping.is_over(0, signal.SIGINT) or stopping.stops.saving
    assert stopping.passed_on == [signal.SIGUSR1 if saves else signal.SIGTERM]
    assert stopping.is_over(STOP_S + 1) is not saves
    assert stopping.is_over(GRACE_S)


def test_a_sigusr1_that_asks_for_no_end_is_handed_on_to_whoever_catches_it(stopping):
    for times in (1, 2):
        assert not stopping.is_over(2 * SAME_S, signal.SIGUSR1)
        if stopping.stops.saving:
            assert (stopping.passed_on, stopping.handed_on) == ([signal.SIGUSR1], [])
        else:
            assert (stopping.passed_on, stopping.handed_on) == ([], [signal.SIGUSR1] * times)
            assert stopping.stops.by is None


def test_a_notice_is_a_sigterm_that_may_come_again_and_is_none_once_a_signal_has_come(stopping):
    for _ in range(3):
        stopping.stops.stop_to_restart()
        assert not stopping.is_over(2 * SAME_S)
    assert (stopping.stops.by, stopping.stops.is_to_restart) == (signal.SIGTERM, True)
    assert stopping.passed_on == [signal.SIGUSR1 if stopping.stops.saving else signal.SIGTERM]
    assert not stopping.is_over(2 * SAME_S, signal.SIGINT)  # the ranks save
    assert not stopping.stops.is_to_restart
    assert stopping.is_over(2 * SAME_S, signal.SIGINT)
