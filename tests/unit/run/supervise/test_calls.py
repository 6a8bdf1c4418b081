import pytest

from hvdtrain.settings.safety import calls as recorded
from launch.run.supervise.traces.calls import Call, compare, named, parse_calls

GRADIENTS, METRIC, SAVE = "all-reduce gradients", "all-reduce own.metric", "all-reduce save_point"
AGREE, MINE = "allgather - program/training.py:234 train.py:40", "allgather - - train.py:88"


def sequence(*words, waits=True, first=1, group="world"):
    """The calls of a rank, of which the last one waits."""
    calls = {}
    for number, text in enumerate(words, start=first):
        kind, name, inside, caller = ["" if word == "-" else word for word in (text.split() + 3 * [""])[:4]]
        last = waits and number == first + len(words) - 1
        calls[number] = Call(
            number=number, waits=last, size=8, kind=kind, name=name, inside=inside, caller=caller, group=group
        )
    return {group: calls}


STEPS = [SAVE, GRADIENTS, SAVE, GRADIENTS, SAVE, GRADIENTS]
IN_GRADIENTS = "in the gradients of step 57"


@pytest.mark.parametrize(
    ("of_ranks", "line"),
    [
        # one call too many, of four ranks and of two
        (
            [[*STEPS, SAVE, GRADIENTS], [*STEPS, SAVE, f"{METRIC} - train.py:88"], *2 * [[*STEPS, SAVE, GRADIENTS]]],
            (
                'rank 1 waits in all-reduce "own.metric" of 8 bytes (train.py:88), its call 8; ranks 0, 2, 3 wait '
                f"{IN_GRADIENTS}, their call 8: rank 1 made a call that the others did not"
            ),
        ),
        (
            [[*STEPS, METRIC], [*STEPS, SAVE]],
            (
                'rank 0 waits in all-reduce "own.metric" of 8 bytes, its call 7; '
                'rank 1 waits in all-reduce "save_point" of 8 bytes, its call 7: rank 0 made a call that rank 1 did not'
            ),
        ),
        # one left out, which all have made before
        (
            [[*STEPS, METRIC, *STEPS, METRIC], [*STEPS, METRIC, *STEPS, SAVE], [*STEPS, METRIC, *STEPS, METRIC]],
            (
                'rank 1 waits in all-reduce "save_point" of 8 bytes, its call 14; ranks 0, 2 wait in all-reduce '
                '"own.metric" of 8 bytes, their call 14: rank 1 left out a call that the others made'
            ),
        ),
        # nobody can know which of two was meant
        (
            [[METRIC], [SAVE]],
            (
                'rank 0 waits in all-reduce "own.metric" of 8 bytes, its call 1; '
                'rank 1 waits in all-reduce "save_point" of 8 bytes, its call 1: their calls differ from call 1 on'
            ),
        ),
        # calls without a name match each other, and the ranks wait one later
        (
            [*2 * [[*STEPS, AGREE, SAVE]], [*STEPS, MINE, AGREE]],
            (
                "rank 2 waits in allgather for program/training.py:234 (train.py:40), its call 8; ranks 0, 1 wait in "
                'all-reduce "save_point" of 8 bytes, their call 8: rank 2 made a call that the others did not, '
                "allgather (train.py:88), call 7"
            ),
        ),
    ],
)
def test_one_line_says_who_is_in_which_call(of_ranks, line):
    ranks = {rank: sequence(*calls) for rank, calls in enumerate(of_ranks)}
    assert compare(ranks, steps=dict.fromkeys(ranks, "of step 57")) == line


def test_one_that_does_not_come_is_named_first_with_the_place_where_it_is():
    ranks = {rank: sequence(*STEPS, SAVE, first=4706) for rank in (0, 2, 3)}
    ranks[1] = sequence(*STEPS, waits=False, first=4706)
    others = 'ranks 0, 2, 3 wait in all-reduce "save_point" of 8 bytes, their call 4,712'
    late = "is outside of hvdtrain's calls{}, its last was the gradients, call 4,711"
    assert compare(ranks) == f"rank 1 {late.format('')}; {others}"
    assert compare(ranks, outside={1: "train.py:90"}) == f"rank 1 {late.format(' (train.py:90)')}; {others}"
    assert compare({1: ranks[1]}) is None


def test_each_group_has_a_sequence_of_its_own():
    """Ranks 2 and 3 hold a replica: rank 3 sums in it a second time, while the others are with all."""
    ranks = {3: {**sequence(SAVE, waits=False), **sequence(METRIC, METRIC, group="replica 1")}}
    for rank in range(3):
        ranks[rank] = {**sequence(SAVE, SAVE), **sequence(METRIC, waits=False, group=f"replica {rank // 2}")}
    assert compare(ranks) == (
        'rank 3 waits in all-reduce "own.metric" of 8 bytes in replica 1, its call 2; ranks 0-2 wait in all-reduce '
        '"save_point" of 8 bytes, their call 2: rank 3 did not make a call that others wait in'
    )


def test_callers_of_equal_calls_may_differ():
    other = [*STEPS, AGREE.replace("40", "41"), SAVE]
    assert ": " not in compare({0: sequence(*STEPS, AGREE, SAVE), 1: sequence(*other)}).replace(".py:", "")


def test_the_line_of_many_ranks_is_short():
    assert named({5}) == "rank 5"
    assert named({0, 3, 2, 1, 7, 9, 8, 11, 12}) == "ranks 0-3, 7-9, 11, 12"
    assert named(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 12 more"


# --- the file


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The record of a rank in tmp_path."""
    monkeypatch.setattr(recorded, "_memory", bytearray(len(recorded._memory)))
    monkeypatch.setattr(recorded, "_of_groups", {})
    monkeypatch.setattr(recorded, "_is_overdue", lambda: False)
    (tmp_path / "ranks").mkdir()
    return tmp_path / "ranks" / "rank-3.calls"


def test_the_last_calls_of_each_group_are_kept(record, tmp_path):
    world, replica = recorded.of_group("world"), recorded.of_group("replica 1")
    assert recorded.of_group("world") is world
    with world.record("allgather", size=5):
        pass
    recorded.keep_in(tmp_path, 3, lambda: False)
    with replica.record("all-reduce", "own", size=4):
        groups = parse_calls(record.read_bytes())
    assert groups["world"][1].size == 5
    assert not groups["world"][1].waits
    own = groups["replica 1"][1]
    assert (own.waits, own.kind, own.name, own.group) == (True, "all-reduce", "own", "replica 1")
    assert own.number == 1
    for _ in range(100):
        with world.record("all-reduce", "x" * 200), world.record("a part of it"):
            pass
    groups = parse_calls(record.read_bytes())
    assert sorted(groups["world"]) == list(range(38, 102))
    assert not groups["replica 1"][1].waits
    world.restart("world 0 2")
    assert parse_calls(record.read_bytes()).keys() == {"replica 1"}


def test_one_that_fails_was_waiting(record, tmp_path):
    world = recorded.of_group("world")
    recorded.keep_in(tmp_path, 3, lambda: False)
    with pytest.raises(OSError, match="gone"), world.record("gather"):
        raise OSError("gone")
    assert parse_calls(record.read_bytes())["world"][1].waits
    with world.record("gather"):
        pass
    assert not parse_calls(record.read_bytes())["world"][2].waits


def test_a_rank_that_goes_on_too_late_leaves_its_record_alone(record, tmp_path):
    world, is_overdue = recorded.of_group("world"), False
    recorded.keep_in(tmp_path, 3, lambda: is_overdue)
    with world.record("gather"):
        pass
    before, is_overdue = record.read_bytes(), True
    with world.record("gather"):
        assert record.read_bytes() == before
    assert record.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 50_000, bytes(50_000)])
def test_a_file_of_another_version_is_nonsense_and_no_error(content):
    ranks = {0: parse_calls(content), 1: sequence(SAVE)}
    assert isinstance(compare({rank: groups for rank, groups in ranks.items() if groups}), str)
