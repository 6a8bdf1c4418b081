import json
import signal
from pathlib import Path

import pytest

from launch.advice.tune import confirm, measure
from launch.advice.tune.measure import Measurer
from launch.advice.tune.remedies import Catalogue
from launch.advice.tune.walk import Start, Walk
from launch.run.supervise.run import RunResult
from tests.unit.advice.tune.simulated import remedy
from tests.unit.machines import request

LOCAL = remedy("local", same=False)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Whole trainings that are not made: accuracy by seed, less with --local."""
    ended = {"status": 0, "stopped": False}

    def run(prepared, **_):
        program, environment = prepared
        folder = Path("runs") / environment["HVDLAUNCH_JOB"]
        folder.mkdir(parents=True)
        accuracy = 0.9 + int(environment["HVDLAUNCH_SEED"]) / 100 - (0.05 if "--local" in program else 0)
        (folder / "result.json").write_text(json.dumps({"eval_accuracy": accuracy}))
        return RunResult(run_folder=str(folder), why=None, **ended)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "prepare", lambda wanted, environment, _: (wanted.program, environment))
    monkeypatch.setattr(measure, "run", run)
    return ended


def walk():
    start = Start(rate=50.0, seconds=1.0, epoch_samples=1000)
    return Walk(remedies=[LOCAL], budget_s=1.0, start=lambda *_: start, best=(LOCAL,), baseline=start)


def measurer():
    catalogue = Catalogue(remedies=(LOCAL,), measure=("--epochs", "100000"))
    return Measurer(request=request(program=("train",)), catalogue=catalogue, environment={}, job="mine")


def test_both_trainings_run_to_their_end_with_each_seed_and_leave_no_weights(trained):
    found = confirm.confirm(measurer(), walk(), 3)
    assert found == [pytest.approx(pair) for pair in ((0.90, 0.85), (0.91, 0.86), (0.92, 0.87))]
    assert not list(Path("runs").iterdir())


def test_a_training_that_fails_has_no_accuracy_and_a_signal_ends_all(trained):
    trained["status"] = 1
    assert "not measured" in confirm.accuracy_line(confirm.confirm(measurer(), walk(), 3))
    assert len(list(Path("runs").iterdir())) == 1, "it trains on, though there is nothing to compare with"
    trained |= {"status": 128 + signal.SIGINT, "stopped": True}
    Path("runs").rename("before")
    with pytest.raises(SystemExit, match="130"):
        confirm.confirm(measurer(), walk(), 1)


def test_the_line_has_the_mean_difference_and_its_range():
    line = confirm.accuracy_line([(0.9, 0.9), (0.8, 0.6)])
    assert "0.8500 with the same training, 0.7500 with another one: -0.1000 (-0.2000 to +0.0000), n = 2." in line


def test_the_cost_is_that_of_the_samples(trained):
    assert "about 4 minutes" in confirm.cost_line(walk(), 2, 3)  # 2 x 2 trainings of 3 epochs of 1,000 at 50/s
    assert "not known" in confirm.cost_line(walk(), 2, None)
