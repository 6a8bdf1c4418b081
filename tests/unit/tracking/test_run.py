import json
from threading import Event
from types import SimpleNamespace

import pytest

from hvdtrain.safety import faults
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.tracking import run
from tests.ranks import Rank
from tests.steps import CPU
from tests.unit.loop.reported import IMAGES


@pytest.mark.parametrize(("rank", "asked"), [(0, 1), (1, 0)])
def test_only_the_rank_that_writes_asks_for_the_environment_and_speaks(monkeypatch, tmp_path, capsys, rank, asked):
    times = []
    monkeypatch.setattr(run, "environment", lambda: times.append(rank) or {"command": ["it"]})
    monkeypatch.setattr(run.exits, "install_stop_handlers", lambda *_, **__: Event())
    (tmp_path / "ranks").mkdir()
    monkeypatch.setenv("HVDLAUNCH_LOGS", "/shared/logs/mine")
    one = run.Run(Rank(rank, 2), tmp_path, SimpleNamespace(step=None), faults.NONE)
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


@pytest.mark.parametrize(("elastic", "ended"), [(True, EndOfRun), (False, ConnectionError)])
def test_a_rank_that_dies_as_all_end_does_not_change_how(monkeypatch, tmp_path, elastic, ended):
    def torn(_):
        raise ConnectionError

    concluded = []
    monkeypatch.setattr(run, "loss_errors", lambda: (ConnectionError,))
    comm = Rank(0, 2)
    watch = SimpleNamespace(collective=object(), close=lambda: None)
    monkeypatch.setattr(run.watchdog, "OFF", watch)

    def end():
        with run.open_run(comm, tmp_path, hang_timeout_s=0, timeline=False, elastic=elastic) as one:
            assert comm.wait_context is watch.collective
            one.device, comm.answers = CPU, torn
            one.tracker = SimpleNamespace(write_rank_facts=lambda *_, **__: None, result={}, conclude=concluded.append)
            raise EndOfRun("asked to leave", status=0, reason="preempted")

    with pytest.raises(ended):
        end()
    assert concluded == (["preempted"] if elastic else [])
