import math

import pytest

from launch.tune.compare import gain, t_quantile


@pytest.mark.parametrize(  # Abramowitz and Stegun 1964, table 26.10
    ("level", "degrees", "quantile"),
    [
        (0.05, 1, 12.706),
        (0.01, 10, 3.169),
        (0.001, 3, 12.924),
        (0.05, 30, 2.042),
    ],
)
def test_quantiles_are_those_of_the_tables(level, degrees, quantile):
    assert t_quantile(level, degrees) == pytest.approx(quantile, abs=6e-4)


def test_a_gain_is_the_mean_of_the_pairs_and_drift_between_pairs_does_not_count():
    found = gain([(100, 150), (50, 75), (200, 300.1), (400, 599.9)], [], 1)
    assert found.times == pytest.approx(1.5, rel=1e-3)
    assert 1.49 < found.low < 1.5 < found.high < 1.51
    assert found.is_credited


def test_one_of_many_candidates_must_be_surer():
    pairs = [(100, 110), (100, 112), (100, 108), (100, 111)]
    intervals = [gain(pairs, [], tests) for tests in (1, 10, 100)]
    assert intervals[0].low > intervals[1].low > intervals[2].low


def test_two_pairs_alone_are_sure_of_nothing_and_with_earlier_ones_of_much():
    pairs = [(100, 151), (100, 149)]
    assert not gain(pairs, [], 10).is_credited
    assert gain(pairs, [[(100, 101), (100, 99), (100, 100)]] * 3, 10).is_credited


def test_noisier_pairs_than_the_others_keep_their_own_noise():
    quiet = [[(100, 100.1), (100, 99.9)]] * 10
    assert not gain([(100, 140), (100, 80)], quiet, 1).is_credited


def test_pairs_of_what_slows_a_step_are_no_measure_of_the_noise_of_others():
    pairs, steady = [(100, 151), (100, 149)], [(100, 101), (100, 99)]
    assert gain(pairs, [steady, [(100, 50), (100, 5)]], 10) == gain(pairs, [steady], 10)


@pytest.mark.parametrize("times", [0.5, 1.0, 1.029])
def test_what_is_below_three_percent_is_not_credited_however_sure(times):
    found = gain([(100, 100 * times * (1 + number * 1e-9)) for number in range(6)], [], 1)
    assert not found.is_credited
    assert math.isclose(found.times, times, rel_tol=1e-6)
