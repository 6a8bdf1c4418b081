import json
from threading import Event
from types import SimpleNamespace

import pytest

from hvdtrain.insight.tracking import run
from hvdtrain.settings.safety import faults
from tests.ranks import Rank
from tests.steps import CPU
from tests.unit.loop.reported import IMAGES


@pytest.mark.parametrize(("rank", "asked"), [(0, 1), (1, 0)])
def test_only_the_rank_that_writes_asks_for_the_environment_and_speaks(monkeypatch, tmp_path, capsys, rank, asked):
    times = []
    monkeypatch.setattr(run, "environment", lambda: times.append(rank) or {"command": ["it"]})
    monkeypatch.setattr(run.exits, "install_stop_handlers", lambda *_, **__: Event())
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv("HVDLAUNCH_RANK", '{"logs": "/shared/logs/mine"}')
    one = run.TrackedRun(Rank(rank, 2), tmp_path, SimpleNamespace(step=None), faults.NONE)
    settings = {"model": "m", "data": "d", "recipe": "scaled", "epochs": 1, "accumulate_steps": 2}
    derived = {"global_batch": 8, "micro_batch": 2, "steps": 50, "train_samples": 400, "test_samples": 4}
    derived |= {"classes": 3, "parameters": 7}
    one.start(settings, derived, device=CPU, columns=["model"], task=IMAGES, memory=None)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["data", "model", "ranks", "global batch", "run folder"] * asked
    assert len(times) == asked
    assert (tmp_path / "environment.json").exists() == (tmp_path / "placement.json").exists() == (rank == 0)
    assert one.tracker.result["logs"] == "/shared/logs/mine"
    assert json.loads((tmp_path / "ranks" / f"rank-{rank}.json").read_text())["rank"] == rank


def test_the_watchdog_knows_of_collectives(tmp_path):
    comm = Rank()
    (tmp_path / "ranks").mkdir()
    with run.open_run(comm, tmp_path, hang_timeout_s=60.0, timeline=False), comm.wait_context():
        assert (tmp_path / "ranks" / "rank-0.at").read_text().split() == ["start", "waiting"]
