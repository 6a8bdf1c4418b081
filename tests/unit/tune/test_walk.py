import random
import statistics

import pytest

from launch.tune.walk import BASELINE, Start, Walk, options_of, untried, with_remedy
from tests.unit.tune.simulated import Machine, remedy, walked

TEN = [remedy(f"noop{number}") for number in range(10)]
QUIET = {"of_starts": 0.001, "of_windows": 0.001, "drift": 0.0, "loads": 0.0}


def draws(seed):
    return random.Random(seed)  # noqa: S311 (a simulation)


def slow(noise):
    return pytest.param(noise, marks=pytest.mark.slow)


def machine(**given):
    return Machine(draws=draws(0), **{**QUIET, **given})


@pytest.mark.parametrize(
    "noise",
    [
        {},
        slow({"of_starts": 0.04}),
        slow({"of_starts": 0.0, "of_windows": 0.2, "alike": 0.9}),
        slow({"drift": 0.5}),
    ],
    ids=["usual", "starts differ", "windows differ", "drift"],
)
def test_of_ten_remedies_that_do_nothing_none_is_credited_in_19_of_20_walks(noise):
    walks, wrong = 40, 0
    for seed in range(walks):
        walk = Walk(remedies=TEN, budget_s=1e9)
        walked(walk, Machine(draws=draws(seed), **noise).start)
        assert len(walk.trials) == 10
        wrong += walk.best != BASELINE
    assert wrong <= walks // 20


def test_what_helps_is_found_in_noise_and_kept():
    hits = 0
    remedies = [*TEN[:2], remedy("fast"), *TEN[2:4]]
    for seed in range(10):
        walk = Walk(remedies=remedies, budget_s=1e9)
        walked(walk, Machine(draws=draws(seed), times={"fast": 1.5}).start)
        hits += [one.name for one in walk.best] == ["fast"]
    assert hits >= 9


def test_each_candidate_has_twenty_windows_over_two_starts_and_starts_take_turns():
    walk = Walk(remedies=[remedy("noop")], budget_s=1e9)
    wanted = walked(walk, machine(times={"noop": 0.99}).start)
    assert walk.trials[0].windows >= 20
    assert [len(one.configuration) for one in wanted[2:]] == [0, 1, 1, 0]


def test_a_credited_remedy_is_part_of_what_comes_after_and_the_gain_in_all_is_measured():
    walk = Walk(remedies=[remedy("two"), remedy("slow"), remedy("three")], budget_s=1e9)
    walked(walk, machine(times={"two": 2.0, "three": 3.0, "slow": 0.5}).start)
    assert [one.name for one in walk.best] == ["two", "three"]
    assert walk.same == walk.best
    assert walk.total(walk.best).times == pytest.approx(6, rel=0.05)
    assert walk.is_complete


def test_a_remedy_that_more_pairs_would_not_decide_is_given_up():
    noise = {"of_starts": 0.3, "of_windows": 0.0}
    walk = Walk(remedies=[remedy(f"little{number}") for number in range(10)], budget_s=1e9)
    walked(walk, machine(**noise, times={f"little{number}": 1.05 for number in range(10)}).start)
    unsure = [trial.gain for trial in walk.trials if not trial.gain.is_small and not trial.credited]
    assert unsure
    assert statistics.fmean(gain.pairs for gain in unsure) < 4


@pytest.mark.parametrize(("budget_s", "has_time"), [(1e9, True), (70, False)])
def test_a_total_whose_interval_is_wide_is_measured_again_while_time_is_left(budget_s, has_time):
    walk = Walk(remedies=[remedy("two")], budget_s=budget_s)
    walked(walk, machine(of_starts=0.03, times={"two": 20.0}).start)
    total = walk.total(walk.best)
    assert walk.trials[0].gain.pairs == 2
    assert (total.pairs > 2) == total.is_narrow == has_time


def test_a_better_value_of_the_same_option_multiplies_the_gain():
    bf16, fp16 = (remedy(name, options=("--precision", name)) for name in ("bf16", "fp16"))
    walk = Walk(remedies=[bf16, fp16], budget_s=1e9)
    walked(walk, machine(times={"bf16": 2.0, "fp16": 3.0}).start)
    assert walk.best == (fp16,)
    assert walk.credited_gain(walk.best) == pytest.approx(3, rel=0.05)
    assert walk.total(walk.best).times == pytest.approx(3, rel=0.05)


def test_what_makes_another_training_comes_last_and_is_kept_apart():
    walk = Walk(remedies=[remedy("local", same=False), remedy("bf16")], budget_s=1e9)
    walked(walk, machine(times={"local": 5.0, "bf16": 1.5}).start)
    assert [trial.remedy.name for trial in walk.trials] == ["bf16", "local"]
    assert [one.name for one in walk.same] == ["bf16"]
    assert [one.name for one in walk.best] == ["bf16", "local"]


def test_remedies_for_a_small_part_are_skipped_until_the_rest_has_shrunk():
    wire, threads = remedy("wire", what_for="communication"), remedy("threads")
    walk = Walk(remedies=[wire, threads], budget_s=1e9)
    walked(walk, machine(shares={"communication": 0.05}, times={"threads": 4.0}).start)
    assert [trial.remedy.name for trial in walk.trials] == ["threads", "wire"]
    walk = Walk(remedies=[wire, threads], budget_s=1e9)
    walked(walk, machine(shares={"communication": 0.05}).start)
    assert [trial.remedy.name for trial in walk.trials] == ["threads"]
    assert walk.is_complete
    assert not list(untried(walk))


def test_a_remedy_that_fails_is_a_row_and_the_walk_goes_on():
    walk = Walk(remedies=[remedy("crash"), remedy("fast")], budget_s=1e9)
    walked(walk, machine(times={"fast": 2.0}, problems={"crash": "it crashed"}).start)
    assert walk.trials[0].problem == "it crashed"
    assert [one.name for one in walk.best] == ["fast"]


def test_the_walk_ends_with_its_budget_and_names_what_is_left():
    walk = Walk(remedies=TEN, budget_s=150)
    wanted = walked(walk, machine().start)
    assert 10 * len(wanted) <= 150
    assert 0 < len(list(untried(walk))) < 10
    assert not walk.is_complete


def test_a_baseline_that_fails_ends_the_walk():
    steps = Walk(remedies=TEN, budget_s=1e9).steps()
    next(steps)
    with pytest.raises(ValueError, match="no windows"):
        steps.send(Start(rates=(), seconds=1.0, problem="no windows"))


def test_a_remedy_of_the_same_option_takes_the_place_of_the_earlier_one():
    bf16, fp16 = (remedy(name, options=("--precision", name)) for name in ("bf16", "fp16"))
    other = remedy("other")
    assert options_of(with_remedy((bf16, other), fp16)) == ("--other", "--precision", "fp16")


def test_a_remedy_that_does_not_work_with_what_was_credited_is_tried_in_its_place():
    local, wire, thin = remedy("local"), remedy("wire"), remedy("thin", not_with=("local",))
    times = {"local": 3.0, "wire": 1.5, "thin": 8.0}
    walk = Walk(remedies=[local, wire, thin], budget_s=1e9)
    walked(walk, machine(times=times).start)
    assert [one.name for one in walk.best] == ["wire", "thin"]
    assert walk.trials[-1].gain.times == pytest.approx(8 / 3, rel=0.05)
    assert walk.credited_gain(walk.best) == pytest.approx(12, rel=0.05)
    walk = Walk(remedies=[local, thin], budget_s=1e9)
    walked(walk, machine(times=times | {"thin": 2.0}).start)
    assert [one.name for one in walk.best] == ["local"]
