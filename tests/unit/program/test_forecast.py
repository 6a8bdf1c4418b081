import pytest

from hvdtrain.program import forecast
from hvdtrain.program.forecast import in_words, long_epoch_s
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank


@pytest.fixture
def measured(monkeypatch):
    """A function that forecasts on a computer that takes 0.1 s per sample, and 5 s more the first time."""
    now = 0.0
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now)

    def epoch_s(share, most, comm=None):
        sizes = []

        def run(samples):
            nonlocal now
            now += 0.1 * samples + 5 * (not sizes)
            sizes.append(samples)

        return long_epoch_s(comm or SerialComm(), share, most, run), sizes

    return epoch_s


@pytest.mark.parametrize(
    ("share", "most", "epoch_s", "sizes"),
    [
        (200, 256, None, [2]),  # even the first time promises a short epoch
        (300, 256, None, [2, 2]),
        (9000, 256, 900, [2, 2, 4, 8, 16]),
        (9000, 3, 900, [2, 2, 3]),
        (9000, 1, 900, [1, 1]),
    ],
)
def test_an_epoch_is_as_long_as_its_samples_but_for_the_first_time(measured, share, most, epoch_s, sizes):
    expected = None if epoch_s is None else pytest.approx(epoch_s)
    assert measured(share, most) == (expected, sizes)


def test_the_slowest_rank_decides(measured):
    assert measured(5000, 256, Rank(0, 2, answers=lambda took_s: [took_s, 3 * took_s]))[0] == pytest.approx(1500)


@pytest.mark.parametrize(
    ("seconds", "words"), [(600, "10 minutes"), (7100, "118 minutes"), (7200, "2 hours"), (260_000, "3 days")]
)
def test_a_long_time_in_words(seconds, words):
    assert in_words(seconds) == words
