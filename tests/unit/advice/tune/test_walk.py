import json

import pytest

from launch.advice.tune.walk import BASELINE, PAIRS, Gain, Walk, another_loss, differing_losses, options_of, with_remedy
from launch.advice.tune.windows import COUNTED, WARM_UP, read_windows
from tests.unit.advice.tune.simulated import QUIET, Machine, remedy, walked

TEN = [remedy(f"noop{number}") for number in range(10)]
PRECISIONS = [remedy(name, options=("--precision", name)) for name in ("bf16", "fp16")]


def names(remedies):
    return [one.name for one in remedies]


def quiet(remedies, budget_s=1e9, **machine):
    return walked(remedies, Machine(**{**QUIET, **machine}), budget_s=budget_s)


@pytest.mark.parametrize(
    "noise",
    [{}, {"of_starts": 0.04}, {"of_starts": 0.0, "of_windows": 0.1, "alike": 0.9}, {"drift": 0.5}],
    ids=["usual", "starts differ", "windows differ", "drift"],
)
def test_of_ten_remedies_that_do_nothing_none_is_credited_in_19_of_20_walks(noise):
    walks = [walked(TEN, Machine(seed=seed, **noise)) for seed in range(40)]
    assert {len(walk.trials) for walk in walks} == {10}
    assert sum(walk.best != BASELINE for walk in walks) <= len(walks) // 20


def test_what_helps_is_found_in_noise_and_kept():
    remedies = [*TEN[:2], remedy("fast"), *TEN[2:4]]
    walks = [walked(remedies, Machine(seed=seed, times={"fast": 1.5})) for seed in range(10)]
    assert sum(names(walk.best) == ["fast"] for walk in walks) >= 9


def test_only_what_is_three_percent_faster_in_each_of_six_pairs_is_credited():
    for low, pairs, credited in ((1.031, PAIRS, True), (1.031, PAIRS - 1, False), (1.029, PAIRS, False)):
        assert Gain(times=2.0, low=low, high=3.0, pairs=pairs).is_credited == credited


def test_a_gain_is_the_middle_of_its_pairs_with_the_slowest_and_the_fastest():
    walk = Walk(remedies=[], budget_s=1.0, start=Machine().start, pairs={((), ()): [(50, 75), (100, 200), (10, 12)]})
    assert walk.gain((), ()) == Gain(times=1.5, low=1.2, high=2.0, pairs=3)


def test_starts_take_turns_and_a_remedy_that_is_not_faster_ends_with_its_pair():
    machine = Machine(**QUIET, times={"fast": 2.0, "noop": 0.99})
    walk = walked([remedy("fast"), remedy("noop")], machine)
    order = [len(one.configuration) for one in machine.wanted[2:]]
    assert order[: 2 * PAIRS] == [0, 1, 1, 0] * (PAIRS // 2)
    assert [trial.gain.pairs for trial in walk.trials] == [PAIRS, 1]
    assert walk.gain(BASELINE, walk.best) == walk.trials[0].gain  # no further pairs of the same
    assert machine.starts == 2 + 2 * PAIRS + 2


def test_a_credited_remedy_is_part_of_what_comes_after_and_the_gain_in_all_is_measured():
    walk = quiet([remedy("two"), remedy("slow"), remedy("three")], times={"two": 2.0, "three": 3.0, "slow": 0.5})
    assert names(walk.best) == ["two", "three"]
    assert walk.same == walk.best
    total = walk.gain(BASELINE, walk.best)
    assert (total.times, total.pairs) == (pytest.approx(6, rel=0.05), PAIRS)


@pytest.mark.parametrize("other", [PRECISIONS[1], remedy("fp16", not_with=("bf16",))])
def test_a_better_value_or_what_does_not_work_with_it_takes_the_place_of_an_earlier_one(other):
    walk = quiet([PRECISIONS[0], other], times={"bf16": 2.0, "fp16": 3.0})
    assert walk.best == (other,)
    assert walk.credited_gain(walk.best) == pytest.approx(3, rel=0.05)
    assert walk.gain(BASELINE, walk.best).times == pytest.approx(3, rel=0.05)
    assert names(quiet([PRECISIONS[0], other], times={"bf16": 2.0, "fp16": 1.5}).best) == ["bf16"]
    assert options_of(with_remedy((PRECISIONS[0], remedy("other")), other))[0] == "--other"


def test_what_makes_another_training_comes_last_and_is_kept_apart():
    walk = quiet([remedy("local", same=False), remedy("bf16")], times={"local": 5.0, "bf16": 1.5})
    assert [trial.remedy.name for trial in walk.trials] == ["bf16", "local"]
    assert (names(walk.same), names(walk.best)) == (["bf16"], ["bf16", "local"])


@pytest.mark.parametrize(("higher", "credited"), [(0.0, True), (0.01, True), (0.5, False), (-0.5, False)])
def test_a_remedy_that_says_same_training_is_not_credited_if_its_losses_are_others_in_each_pair(higher, credited):
    walk = quiet(
        [remedy("same"), remedy("another", same=False)],
        times={"same": 2.0, "another": 2.0},
        losses={"same": higher, "another": 1.0},
    )
    assert (names(walk.same), names(walk.best)) == (["same"] * credited, ["same"] * credited + ["another"])
    assert [trial.problem is None for trial in walk.trials] == [credited, True]
    if not credited:
        assert str(walk.trials[0].problem).startswith("another training: mean loss ")


def test_losses_that_differ_to_either_side_or_of_few_steps_are_noise():
    for curve, differ in (([1.0, 1.2] * 10, True), ([1.0, 1.2] * 4, False), ([1.0, 2.0] * 10, False)):
        assert (differing_losses(curve, [loss + 0.5 for loss in curve]) is not None) == differ
    up, down = (1.0, 2.0), (2.0, 1.0)
    assert another_loss([up, up]) == "another training: mean loss 2 instead of 1"
    assert [another_loss(pairs) for pairs in ([up, down], [up, None], [None])] == [None] * 3


def test_remedies_for_a_small_part_are_skipped_until_the_rest_has_shrunk():
    remedies = [remedy("wire", what_for="communication"), remedy("threads")]
    for times, tried in (({"threads": 4.0}, ["threads", "wire"]), ({}, ["threads"])):
        walk = quiet(remedies, shares={"communication": 0.05}, times=times)
        assert [trial.remedy.name for trial in walk.trials] == tried
        assert not walk.untried()


def test_the_walk_ends_with_its_budget_of_which_time_is_left_for_the_gain_in_all():
    """26 starts for two credits, and 10 of which a third trial takes none."""
    walk = quiet([remedy("two"), remedy("three"), remedy("noop")], budget_s=350, times={"two": 2.0, "three": 3.0})
    assert walk.spent_s <= 350
    assert names(walk.untried()) == ["noop"]
    assert walk.gain(BASELINE, walk.best).pairs == 4


def line(**window):
    return json.dumps({"samples": 10, "seconds": 2, **window}) + "\n"


def test_the_warm_up_what_comes_after_and_a_line_that_is_being_written_do_not_count(tmp_path):
    file = tmp_path / "windows.jsonl"
    assert read_windows(file).rates == ()
    file.write_text(line(samples=1) * WARM_UP + line(samples=30) + line()[:9])
    assert read_windows(file).rates == (15,)
    file.write_text(line(samples=1) * WARM_UP + line() * COUNTED + line(samples=1) * 5)
    assert read_windows(file).rates == (5,) * COUNTED
    assert read_windows(file).are_enough


def test_the_last_shares_hold(tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_text(line() + line(shares={"input": 0.5}) + line(shares={"input": 0.2}, epoch_samples=7) + line())
    found = read_windows(file)
    assert (found.shares, found.epoch_samples) == ({"input": 0.2}, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        "[]\n",
        "{}\n",
        line(samples=0),
        line(samples=1e308, seconds=1e-308),  # a rate that is infinite
        line(samples=1e-320, seconds=1e300),  # a rate of 0
        line(shares=3),
        line(shares={"input": 2}),
    ],
)
def test_nonsense_is_named_with_its_line(tmp_path, wrong):
    file = tmp_path / "windows.jsonl"
    file.write_text(line() + wrong)
    with pytest.raises(ValueError, match="line 2"):
        read_windows(file)
