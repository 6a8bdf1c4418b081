from types import SimpleNamespace

import pytest

from hvdtrain.core.position import Position
from hvdtrain.insight.tracking import console
from hvdtrain.loop.progress import Progress
from hvdtrain.settings.safety import life


@pytest.fixture
def now(monkeypatch):
    time = SimpleNamespace(s=100.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: time.s)
    return time


def test_an_epoch_shows_step_loss_speed_and_the_time_left(now):
    progress, reports = Progress(Position(step=100)), SimpleNamespace(window=SimpleNamespace(totals={}))
    shown = console.Console(is_shown=True)
    shown.follow(progress, reports, unit="images")
    for number, _ in enumerate(shown.progress_bar(range(40), title="epoch 3", total=40)):
        if number == 0:
            assert life._doing.text() == "epoch 3: nothing yet, 0 s"
        if number == 4:
            assert life._doing.text() == "epoch 3: 10%, step 104, loss 0.5"
        if number == 10:
            assert life._doing.text() == "epoch 3: 25%, step 110, loss 0.5, 64 images/s, 15 s left"
            reports.window.totals = {}  # a report begins another window
            now.s += 600  # the next step hangs
            assert life._doing.text().endswith("64 images/s, 15 s left")
            assert "loss 0.5" in life._doing.text()
            break
        now.s += 0.5
        reports.window.totals = {"loss": 16.0, "count": 32.0}
        progress.record_step(101 + number, 32 * (number + 1))


def test_what_has_no_known_end_is_counted_and_nothing_is_left_behind(now):
    rows = iter(console.counted("abc", console.ItemCount("reading texts", None, " rows")))
    assert [next(rows), next(rows)] == ["a", "b"]
    assert life._doing.text() == "reading texts: 1 rows"
    assert list(rows) == ["c"]
    assert life._doing is None
