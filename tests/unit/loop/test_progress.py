import time

import pytest

from hvdtrain.core.position import Position
from hvdtrain.loop.progress import Progress, Unreported

BEGUN = Position(step=4, epoch=1, visited=40, cut_from=8, totals={"count": 32.0}, train_s=2.0)


def test_a_step_moves_it_and_a_report_is_where_it_stands():
    progress = Progress(BEGUN)
    progress.took(5, 50)
    assert (progress.position.step, progress.position.visited, progress.reported) == (5, 50, 4)
    assert (progress.position.totals, progress.position.cut_from) == (BEGUN.totals, 8)
    told = Position(step=5, epoch=1, visited=50, totals={"count": 42.0})
    progress.mark_reported(told)
    assert (progress.position, progress.reported) == (told, 5)


def test_it_goes_on_with_nothing_unreported():
    progress = Progress(Position())
    progress.unreported = lambda: Unreported(unreadable=3)
    progress.go_on(BEGUN)
    assert (progress.position, progress.reported, progress.unreported()) == (BEGUN, 4, Unreported())


def test_its_time_runs_on_from_that_of_the_position():
    progress = Progress(BEGUN)
    time.sleep(0.05)
    assert 2.05 <= progress.stopped().train_s < 2.5
    assert progress.stopped().step == 4
    progress.go_on(Position(train_s=100.0))
    assert progress.stopped().train_s == pytest.approx(100.0, abs=0.3)
