from dataclasses import replace

import pytest

from hvdtrain.profiling.gains import SentGradients, compute_gains
from hvdtrain.profiling.profile import Profile
from tests.unit.profiling.test_verdict import rank

FLAT = SentGradients(gradient_bytes=16_000_000, sync="flat", compression="none")


def ranks(hosts, per_host, *, sync=60.0, sent=64e6):
    """Steps of 40 ms of computation, and those who wait longer on the first rank."""
    return [
        replace(rank(number, f"host{number // per_host}", forward=40, sync=sync + (number == 0) * 20), sent_bytes=sent)
        for number in range(hosts * per_host)
    ]


def times(found, gradient_sync=FLAT):
    return compute_gains(found, gradient_sync).times_as_fast


TWO_LEVEL, LOCAL, FP16 = "--sync two-level", "--sync local --sync-every 16", "--compression fp16"


def test_each_way_saves_its_share_of_what_is_waited_for():
    found = compute_gains(ranks(2, 8), FLAT)
    assert (found.exposed_s, found.step_s) == (0.06, 0.1)  # the least wait; others wait longer for ranks
    # 2 hosts must send the gradients once, 16 MB, and send 64
    assert found.times_as_fast == pytest.approx({TWO_LEVEL: 100 / 55, LOCAL: 100 / 47.5, FP16: 100 / 70})
    assert found.sentence == (
        "a step waits 60.0 ms of 100.0 ms for 16.0 MB of gradients, 64.0 MB sent by a host; at most as fast: "
        "--sync two-level 1.82 times, --sync local --sync-every 16 2.11 times, --compression fp16 1.43 times"
    )
    assert found.document()["sentence"] == found.sentence
    assert found.document()["gains"][2] == {"by": FP16, "times_as_fast": pytest.approx(100 / 70)}


@pytest.mark.parametrize(
    ("gradient_sync", "options"),
    [
        (replace(FLAT, sync="two-level"), [LOCAL, FP16]),
        (replace(FLAT, sync="local"), [FP16]),
        (replace(FLAT, compression="fp16"), [TWO_LEVEL, LOCAL]),
    ],
)
def test_what_is_done_already_is_not_named(gradient_sync, options):
    assert list(times(ranks(2, 8), gradient_sync)) == options


def test_a_host_that_sends_no_more_than_it_must_gains_nothing_by_two_levels():
    assert TWO_LEVEL not in times(ranks(2, 8, sent=16e6))
    assert TWO_LEVEL not in times(ranks(2, 8, sent=1e6))
    assert list(times(ranks(1, 8))) == [FP16]  # on one host nothing crosses a link
    # 4 hosts must send 1.5 times the gradients
    assert times(ranks(4, 2, sent=48e6))[TWO_LEVEL] == pytest.approx(100 / 70)


def test_where_hardly_anything_is_waited_for_nothing_is_said():
    assert compute_gains(ranks(2, 8, sync=1.0), FLAT) is None
    assert list(times(ranks(2, 8, sync=2.5))) == [LOCAL]  # a twentieth of a step, but for fp16


def test_it_is_said_after_the_verdict_and_kept():
    profile, without = Profile(ranks(2, 8), gradient_sync=FLAT), Profile(ranks(2, 8))
    assert profile.lines()[-1] == profile.gains.sentence
    document = profile.document()
    assert document["gains"]["sent_bytes"] == document["ranks"][0]["sent_bytes"] == 64e6
    assert without.lines() == [without.verdict.sentence]
    assert "gains" not in without.document()
