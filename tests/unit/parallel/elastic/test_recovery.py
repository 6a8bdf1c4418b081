import json
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call

import pytest
import torch
from torch import nn

from hvdtrain.checkpoint.state import OWN, State
from hvdtrain.core.position import Position
from hvdtrain.insight.tracking.console import Console
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.loop.own_state import OwnState
from hvdtrain.loop.progress import Progress, Unreported
from hvdtrain.parallel.elastic import recovery
from hvdtrain.parallel.elastic.comm import Member
from hvdtrain.parallel.elastic.recovery import RanksJoin, Survivors
from hvdtrain.settings.safety.exits import FAILED, EndOfRun
from hvdtrain.settings.safety.faults import NONE
from hvdtrain.settings.safety.watchdog import OFF
from tests.ranks import Rank, together
from tests.refusals import ended
from tests.steps import CPU
from tests.unit.loop.reported import IMAGES

LOST = Member(number=2, place=2, host="two", pid=12)
NEXT = Member(number=4, place=0, host="one", pid=14)

NEWCOMER = Member(number=5, place=2, host="one", pid=15)


class Left:
    """In place of an ElasticComm: ranks that hear each other, or are said to."""

    loss_errors = (ConnectionError,)
    part = "all"

    def __init__(self, comm, *shrinks):
        """`shrinks` are whom its calls lose, or what they raise."""
        self._comm, self._shrinks = comm, list(shrinks)
        self.rank, self.size, self.data, self.sync_group, self.replica = comm.rank, comm.size, self, self, Rank()
        self.own_member = Member(number=comm.rank, place=comm.rank, host="one", pid=10 + comm.rank)
        self.members, self.aborted, self.invitation = [self.own_member, LOST, NEXT], [], None

    def shrink(self):
        found = self._shrinks.pop(0)
        if callable(found):
            found = found()
        if isinstance(found, Exception):
            raise found
        self.members = [one for one in self.members if one not in found]

    def admit(self, newcomers):
        self.shrink()
        self.members = [*self.members, NEWCOMER]

    def allgather(self, value):
        return self._comm.allgather(value)

    def allreduce(self, values, name="sum"):
        return self._comm.allreduce(values, name)

    def broadcast(self, content, root=0):
        return self._comm._exchange(content)[root]

    def barrier(self):
        pass

    def abort(self, status):
        self.aborted.append(status)


class Scale:
    """In place of a wire's or a scaler's."""

    def __init__(self, value=1.0):
        self.value, self.ranks = value, None

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

    def restart(self, ranks):
        self.ranks = ranks


def training_of(comm, value):
    """A model whose weights, momentum, loss scale and state of the program are all this value."""
    own = OwnState()
    own.values["seen"] = torch.tensor(value)  # not JSON
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return State(
        comm=comm, device=CPU, seed=0, model=model, average=None, optimizer=optimizer,
        shared={"scale": Scale(value), OWN: own}, per_rank={},
    )  # fmt: skip


def values_of(parts, sync):
    """All that a training has, as a set of numbers."""
    momenta = [held["momentum_buffer"] for held in parts.optimizer.state.values()]
    tensors = [*parts.model.parameters(), *momenta]
    small = sync.value, parts.shared["scale"].value, float(parts.shared[OWN].values["seen"])
    return {*small, *(value for one in tensors for value in one.flatten().tolist())}


@pytest.fixture
def survivors(tmp_path, monkeypatch):
    """One of the ranks that are left, at a position; and what it has."""
    monkeypatch.setattr(recovery.exits, "set_failure_exit", lambda _: None)
    monkeypatch.setattr(recovery.exits, "skip_mpi_finalize", lambda: None)
    monkeypatch.setattr(recovery.folder, "lock_orphan", lambda _: [])
    trackers = []

    def make(comm, position=None, *, value=1.0, reported=0, unreported=None, counted=None, min_np=1):
        counts = ("lost_ranks", "joined_ranks", "recoveries")
        tracker = Tracker(tmp_path, is_writer=False, task=IMAGES, result={}, counts=counts)
        trackers.append(tracker)
        tracker.result |= counted or {}
        run = SimpleNamespace(tracker=tracker, watch=OFF, faults=NONE, folder=tmp_path, console=Console(is_shown=False))
        run.become_rank_zero = lambda: (tracker.become_rank_zero(), run.console.turn_on())
        progress = Progress(position or Position())
        progress.reported = reported
        progress.unreported = lambda: unreported or Unreported()
        one = SimpleNamespace(parts=training_of(comm, value), sync=Scale(value), progress=progress, run=run, undone=[])
        one.saves = Mock(parts=one.parts, run=run)
        one.recovery = Survivors(
            comm,
            one.sync,
            one.saves,
            progress,
            undo=lambda: one.undone.append(True),
            grow=False,
            min_np=min_np,
            hang_timeout_s=0,
        )
        return one

    yield make
    for tracker in trackers:
        if tracker.is_writer:
            tracker._lines.close()
            tracker._events.close()


@pytest.mark.parametrize(
    ("standings", "furthest"),
    [
        ([(3, 0, 0), (4, 0, 0), (3, 0, 0)], 1),
        ([(4, 0, 4), (4, 1, 4)], 0),  # the lowest, which records epochs, has yet to end this one
        ([(4, 1, 0), (5, 0, 4)], 1),
        ([(4, 0, 0), (4, 0, 4), (4, 0, 4)], 1),  # it knows what the others had not reported
    ],
)
def test_the_furthest_gives_the_others_its_state(survivors, standings, furthest):
    def on(rank):
        step, epoch, reported = standings[rank.rank]
        position = Position(step=step, epoch=epoch, visited=10 * step, cut_from=rank.rank)
        one = survivors(Left(rank), position, value=float(step), reported=reported)
        _, agreed, _ = one.recovery._agree(one.recovery._current_standing())
        return agreed, values_of(one.parts, one.sync)

    step, epoch, _ = standings[furthest]
    for position, values in together(len(standings), on):
        assert (position.step, position.epoch, position.cut_from) == (step, epoch, furthest)
        assert values == {float(step)}


def unreported(count, **more):
    return Unreported(totals={"loss": 2.0 * count, "count": float(count)}, **more)


@pytest.mark.parametrize(
    ("reported", "counts", "expected"),
    [
        ([0, 0, 0], [3, 4, 5], 12),
        ([6, 0], [1, 100], 1),  # what the second has not reported, the first has in its report
    ],
)
def test_what_was_not_reported_comes_together(survivors, reported, counts, expected):
    def on(rank):
        step, count = reported[rank.rank], counts[rank.rank]
        before = Position(step=8, totals={"loss": 10.0 * step, "count": 5.0 * step})
        known = unreported(count, unreadable=rank.rank + 1, loss_spikes=1, skipped_steps=2)
        one = survivors(
            Left(rank), before, reported=step, unreported=known, counted={"steps": step, "skipped_steps": step}
        )
        there, position, found = one.recovery._agree(one.recovery._current_standing())
        return position.totals, found, there["tracker"]["result"]

    asked = [rank for rank, step in enumerate(reported) if step == max(reported)]
    for totals, found, result in together(len(reported), on):
        assert totals == {
            "loss": 10.0 * max(reported) + 2.0 * expected,
            "count": 5.0 * max(reported) + expected,
        }
        assert found == {
            "skipped_steps": 2,  # all ranks skip them together
            "loss_spikes": len(asked),
            "unreadable_images": sum(rank + 1 for rank in asked),
        }
        assert (result["steps"], result["skipped_steps"]) == (max(reported), max(reported))


class Alone(Rank):
    def _exchange(self, value):
        return [value]


def test_the_lowest_leads_and_counts(survivors, tmp_path):
    one = survivors(Left(Alone(), [LOST]), Position(step=5), unreported=unreported(3, loss_spikes=1))
    assert one.recovery.recover(ConnectionError()).totals == {"loss": 6.0, "count": 3.0}
    assert (one.undone, one.sync.ranks, one.saves.mock_calls) == ([True], 1, [call.go_on(np=1)])
    result = one.run.tracker.result
    assert (result["lost_ranks"], result["recoveries"], result["loss_spikes"], result["steps"]) == (1, 1, 1, 5)
    assert '"ranks": [2], "hosts": ["two"], "np": 1' in (tmp_path / "metrics.jsonl").read_text()


def test_another_one_lost_meanwhile_is_a_second_try(survivors):
    one = survivors(Left(Alone(), ConnectionError(), ConnectionError(), [LOST]), Position(step=5))
    assert one.recovery.recover(ConnectionError()).step == 5
    assert one.undone == [True]
    assert one.run.tracker.result["recoveries"] == 1


def test_sums_that_fail_though_nobody_is_lost_end_the_run(survivors):
    one = survivors(Left(Alone(), []))
    with pytest.raises(EndOfRun, match="no rank was lost: no route") as end:
        one.recovery.recover(ConnectionError("no route"))
    assert end.value.status == FAILED


@pytest.mark.parametrize(("min_np", "ends"), [(1, False), (2, True)])
def test_too_few_ranks_save_and_end(survivors, min_np, ends):
    one = survivors(Left(Alone(), [LOST]), Position(step=5), min_np=min_np)
    if not ends:
        one.recovery.recover(ConnectionError())
        return
    attempt = partial(one.recovery.recover, ConnectionError())
    assert ended(attempt, r"1 rank .*--min-np 2.* step 5") == (FAILED, "too few ranks")
    assert one.saves.mock_calls[1:] == [call.save(ANY), call.wait(5)]


@pytest.mark.parametrize(("takes_s", "aborted"), [(0.0, []), (0.3, [FAILED])])
def test_ranks_that_do_not_close_up_in_time_end(survivors, monkeypatch, capsys, takes_s, aborted):
    monkeypatch.setattr(recovery, "LIMIT_S", 0.2)
    one = survivors(Left(Alone(), lambda: time.sleep(takes_s) or [LOST]))
    one.recovery.recover(ConnectionError())
    time.sleep(0.3 - takes_s)
    assert one.recovery._comm.aborted == aborted
    assert ("recovery did not finish within 0 s" in capsys.readouterr().err) == bool(aborted)


def test_a_newcomer_takes_over_what_the_furthest_has(survivors):
    def on(rank):
        one = survivors(Left(rank), Position(step=4 + rank.rank), value=float(4 + rank.rank), reported=3)
        one.parts.model.register_buffer("mean", torch.tensor(10.0 * rank.rank))
        stands = None if rank.rank == 2 else one.recovery._current_standing()
        there, position, _ = one.recovery._agree(stands)
        return position.step, there["reported"], values_of(one.parts, one.sync), one.parts.model.mean.item()

    first, second, newcomer = together(3, on)
    assert first == (5, 3, {5.0}, 0.0)  # its running statistics are its own
    assert second == (5, 3, {5.0}, 10.0)
    assert newcomer == (5, 3, {5.0}, 10.0)


def test_where_only_newcomers_are_left_they_end(survivors, monkeypatch):
    monkeypatch.setattr(recovery.exits, "kill_self", Mock(side_effect=SystemExit))
    one = survivors(Left(Alone()))
    with pytest.raises(SystemExit):
        one.recovery._agree(None)


@pytest.mark.parametrize(
    ("taken_in", "lost", "joined"), [([[]], [], [5]), ([ConnectionError(), [LOST]], [2], []), ([[LOST]], [2], [5])]
)
def test_newcomers_are_taken_in_or_lost_at_the_end_of_a_step(survivors, tmp_path, taken_in, lost, joined):
    one = survivors(Left(Alone(), *taken_in), Position(step=5))
    assert one.recovery.recover(RanksJoin()).step == 5
    result = one.run.tracker.result
    assert (result["lost_ranks"], result["joined_ranks"]) == (len(lost), len(joined))
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one["ranks"] for one in told] == [who for who in (lost, joined) if who]
    assert [one.get("in_place_of") for one in told if one["event"] == "joined"] == ([[2]] if joined else [])


def test_a_join_that_fails_without_a_loss_is_none(survivors):
    one = survivors(Left(Alone(), ConnectionError(), []), Position(step=5))
    assert one.recovery.recover(RanksJoin()).step == 5
    assert one.run.tracker.result["recoveries"] == 0
