import json
from dataclasses import replace

import pytest

from hvdtrain.core.phases import PHASES
from hvdtrain.insight.profiling import picture
from hvdtrain.insight.profiling.parts import PARTS, WAITING, compute_parts
from hvdtrain.insight.profiling.profile import Profile
from hvdtrain.insight.profiling.verdict import REMEDIES
from tests.unit.insight.profiling.test_verdict import rank as verdict_rank
from tests.unit.insight.profiling.test_verdict import seconds

PLAIN = {"read": 1, "to_device": 1, "augment": 2, "forward": 30, "loss": 1, "backward": 55, "optimizer": 5, "other": 1}
ALONE = {**PLAIN, "read": 10, "sync": 20}


def rank(number=0, *, alone=ALONE, error_ms=0.1, **whole):
    return replace(
        verdict_rank(number, **{**PLAIN, **whole}),
        alone_s=None if alone is None else seconds(alone),
        error_s=None if error_ms is None else error_ms / 1000,
    )


def named(parts):
    return {one.part: one for one in parts.parts}


def test_the_parts_are_those_of_the_phases():
    phases = [phase for of_part in PARTS.values() for phase in of_part]
    assert sorted(phases) == sorted(PHASES)
    assert compute_parts([rank(0), rank(1, alone=None)]) is None  # without the second pass on every rank


def test_own_exposed_hidden_and_what_is_to_gain():
    parts = compute_parts([rank(0, sync=5), rank(1, sync=5)])
    assert (parts.step_s, parts.compute_s) == (pytest.approx(0.101), pytest.approx(0.091))
    found = named(parts)
    assert list(found) == [*PARTS, WAITING]
    values = [[one.isolated_s, one.exposed_s, one.hidden, one.gain_at_most] for one in (found["read"], found["sync"])]
    assert values[0] == pytest.approx([0.011, 0.002, 1 - 2 / 11, 2 / 101])
    assert values[1] == pytest.approx([0.020, 0.005, 0.75, 5 / 101])
    assert found["forward"].hidden is found["record"].hidden is None
    assert found[WAITING].exposed_s == 0
    assert sum(one.exposed_s for one in parts.parts) == pytest.approx(parts.step_s)


@pytest.mark.parametrize(("sync_ms", "hidden"), [(0.9, None), (1.0, 1)])  # 1 % of a step
def test_a_short_part_has_no_hidden_share(sync_ms, hidden):
    assert named(compute_parts([rank(alone={**ALONE, "sync": sync_ms})]))["sync"].hidden == hidden


def test_a_wait_that_is_longer_than_the_sum_is_for_other_ranks():
    found = named(compute_parts([rank(0, sync=80), rank(1, sync=50)]))
    assert (found["sync"].exposed_s, found["sync"].hidden) == (pytest.approx(0.020), 0)
    assert found[WAITING].exposed_s == pytest.approx(0.060)  # the longest wait less the sum


@pytest.mark.parametrize(
    ("ranks", "outcome", "words"),
    [
        # the limit of 5 %, from both sides
        ([rank(augment=1)], "nothing to do", ["nothing to do: ", "95.00 ms", "91.00 ms"]),
        ([rank(augment=2)], "to hide", ["5% to hide"]),
        # inside and outside of two standard errors
        ([rank(sync=10, error_ms=8)], "too noisy to tell", ["16.00 ms"]),
        ([rank(sync=10, error_ms=7)], "to hide", []),
        ([rank(sync=10, error_ms=None)], "too noisy to tell", ["too few steps"]),
        # what there is most of to gain
        ([rank(sync=15), rank(sync=15)], "to hide", ["most of it is sync, at most 14%", "--compression"]),
        ([rank(read=40)], "to hide", ["most of it is read, at most 30%", REMEDIES["read"]]),
        ([rank(other=40)], "to hide", ["most of it is record", "--report-every-steps"]),
        ([rank(sync=80), rank(sync=50)], "to hide", ["most of it is waiting", "other jobs"]),
        ([rank(backward=90, sync=6)], "to hide", ["most of it is computing slower", "fewer ranks"]),
    ],
)
def test_outcomes(ranks, outcome, words):
    parts = compute_parts(ranks)
    assert parts.outcome == outcome, parts.sentence
    assert "\n" not in parts.sentence
    assert all(word in parts.sentence for word in words), parts.sentence


def test_the_file_and_the_lines_have_them():
    found = [rank(0, sync=5), rank(1, sync=5)]
    document = Profile(found).document()
    assert json.loads(json.dumps(document)) == document
    assert document["outcome"] == "to hide"
    assert [one["part"] for one in document["parts"]] == [*PARTS, WAITING]
    assert document["ranks"][1]["alone_s"]["sync"] == 0.02
    assert Profile(found).lines()[0] == document["parts_sentence"]
    late = Profile([rank(0, sync=85), rank(1, sync=5, forward=110)])
    assert late.lines()[0] == late.verdict.sentence


def test_the_picture_has_both_costs_of_each_part_below_the_ranks():
    figure = picture.draw(Profile([rank(0, sync=5), rank(1, sync=5)]))
    ranks, parts = figure.axes
    assert len(ranks.patches) == 2 * len(PHASES)
    widths = [bar.get_width() for bar in parts.patches]
    assert len(widths) == 2 * (8 + 1)
    labels = [label.get_text() for label in parts.get_yticklabels()]
    assert labels[5] == "sync\n75% hidden"
    assert (widths[5], widths[9 + 5]) == (pytest.approx(20), pytest.approx(5))
    assert len(picture.draw(Profile([rank(0, alone=None)])).axes) == 1
