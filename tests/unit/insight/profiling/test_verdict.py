import json
from dataclasses import replace

import pytest

from hvdtrain.core.phases import OFF, PHASES
from hvdtrain.insight.profiling import clocks
from hvdtrain.insight.profiling.clocks import HostClock
from hvdtrain.insight.profiling.profile import Profile, gather_profile
from hvdtrain.insight.profiling.verdict import REMEDIES, RankMeans, judge
from tests.ranks import Rank


def seconds(milliseconds):
    return dict.fromkeys(PHASES, 0.0) | {phase: ms / 1000 for phase, ms in milliseconds.items()}


def rank(number, host="a", **milliseconds):
    phases_s = seconds(milliseconds)
    return RankMeans(rank=number, host=host, steps=10, step_s=sum(phases_s.values()), phases_s=phases_s)


PLAIN = {"read": 2, "augment": 2, "forward": 30, "loss": 1, "backward": 55, "optimizer": 5}


def ranks(count, **changes):
    return [rank(number, **{**PLAIN, **changes}) for number in range(count)]


@pytest.mark.parametrize(
    ("found", "kind", "share", "words"),
    [
        (ranks(1, sync=5), "compute-bound", 0.91, ["--precision", "91%"]),
        # the limit, from both sides
        (ranks(4, sync=23), "compute-bound", 91 / 118, []),
        (ranks(4, sync=24), "communication-bound", 24 / 119, ["--accumulate-steps", "--fusion-threshold-mb"]),
        (ranks(1, read=20), "compute-bound", 91 / 113, []),
        (ranks(1, read=21), "input-bound", 23 / 114, ["dataset read (21.0 ms)", REMEDIES["read"]]),
        (ranks(4, bubble=24), "pipeline-bound", 24 / 119, ["stages wait for each other", "--accumulate-steps"]),
        # the larger of two
        (ranks(2, read=200, sync=150), "input-bound", 202 / 443, []),
        (ranks(2, read=150, sync=200), "communication-bound", 200 / 443, []),
        # one late rank: the others wait for it in sync, which is not communication
        (
            [rank(0, "a", **PLAIN, sync=65), rank(1, "b", **{**PLAIN, "forward": 90}, sync=5)],
            "straggler",
            60 / 160,
            ["rank 1 on b", "forward takes 90.0 ms against 30.0 ms"],
        ),
        # its limit is lower, from both sides
        ([rank(0, **PLAIN, sync=15), rank(1, **{**PLAIN, "loss": 10}, sync=6)], "compute-bound", 91 / 110, []),
        ([rank(0, **PLAIN, sync=20), rank(1, **{**PLAIN, "loss": 13}, sync=8)], "straggler", 12 / 115, ["loss"]),
        (ranks(2, other=30, record=10), "compute-bound", 91 / 135, []),
    ],
)
def test_verdicts(found, kind, share, words):
    verdict = judge(found)
    assert (verdict.kind, verdict.share) == (kind, pytest.approx(share))
    assert verdict.sentence.startswith(f"{kind}: ")
    assert "\n" not in verdict.sentence
    assert f"{verdict.share:.0%}" in verdict.sentence
    assert all(word in verdict.sentence for word in words), verdict.sentence
    assert (verdict.rank is not None) == (verdict.host is not None) == (kind == "straggler")


def test_a_rank_without_a_core_is_named(tmp_path, monkeypatch):
    waiting = "; rank 1 on b waits 11% of each step for a core: "
    slow, busy = rank(1, "b", **PLAIN), replace(rank(1, "b", **PLAIN), queued_s=0.0105)
    assert waiting not in judge([rank(0, "a", **PLAIN), replace(slow, queued_s=0.009)]).sentence
    both = [replace(means, alone_s=means.phases_s, error_s=0.0) for means in (rank(0, "a", **PLAIN), busy)]
    assert waiting in Profile(both).verdict.sentence
    assert waiting in Profile(both).lines()[0]

    schedstat = tmp_path / "schedstat"
    monkeypatch.setattr(clocks, "SCHEDSTAT", schedstat)
    schedstat.write_text("9 7000000000 3")
    assert clocks.read_queued_s() == 7.0
    schedstat.unlink()
    assert clocks.read_queued_s() == 0.0


def test_a_task_names_its_own_remedies():
    found = rank(0, augment=300)
    profile = Profile([replace(found, alone_s=found.phases_s, error_s=0.0)], {**REMEDIES, "augment": "fewer words"})
    assert profile.verdict.sentence.endswith("; what helps: fewer words")
    assert {one.part: one.remedy for one in profile.parts.parts}["augment"] == "fewer words"
    assert profile.parts.sentence.endswith(": fewer words")


def test_the_file_has_the_spread_over_ranks_and_names_the_slowest():
    found = [rank(0, "a", forward=30, sync=40), rank(1, "b", forward=60, sync=10), rank(2, "a", forward=35, sync=35)]
    document = Profile(found).document()
    spread = {"min_s": 0.03, "median_s": 0.035, "max_s": 0.06, "max_rank": 1, "max_host": "b"}
    assert document["phases"]["forward"] == spread
    assert document["slowest"] == {"rank": 1, "host": "b", "own_s": pytest.approx(0.06)}
    assert document["step_s"] == pytest.approx(0.07)
    assert document["verdict"] == "straggler"
    assert json.loads(json.dumps(document)) == document


def pair():
    """Two ranks; the other one is twice as slow."""

    def answers(value):
        other = {phase: 2 * seconds for phase, seconds in value["phases_s"].items()}
        return [value, {**value, "rank": 1, "host": "far", "phases_s": other}]

    return Rank(0, 2, answers=answers)


def test_the_means_of_all_clocks_are_gathered():
    clock = HostClock(unmeasured_steps=0)
    assert gather_profile(pair(), OFF) is gather_profile(pair(), clock) is None
    clock.enter("forward")
    clock.end_step()
    profile = gather_profile(pair(), clock)
    assert [means.rank for means in profile.ranks] == [0, 1]
    assert (profile.verdict.kind, profile.verdict.host) == ("straggler", "far")
