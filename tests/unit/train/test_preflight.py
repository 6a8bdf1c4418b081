import os
import stat
from dataclasses import asdict

import pytest

from hvdtrain.checkpoint import changes as differences
from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.train.preflight import make_run_folder
from hvdtrain.vision.config import EffnetConfig


@pytest.fixture
def saved(tmp_path):
    """A run with a checkpoint of step 7; the function opens its folder once more, with other settings."""
    umask = os.umask(0o022)
    folder = tmp_path / "effnet" / "r"
    (folder / "ranks").mkdir(parents=True)
    about = {
        "images": 100,
        "config": differences.as_json(asdict(EffnetConfig())),
        "position": {"step": 7, "epoch": 0, "visited": 70},
    }
    checkpoint.write(folder / "checkpoints", 7, {"state": {}}, about=about)

    def opened(**settings):
        config = EffnetConfig(runs_dir=tmp_path, run="r", **settings)
        made = make_run_folder(SerialComm(), config, training_images=100)
        os.close(made.opened.lock)
        return made

    yield opened
    os.umask(umask)


@pytest.mark.parametrize(
    ("resume", "attempt", "step"), [("auto", "0", 7), ("never", "0", None), ("auto", "1", 7), ("never", "1", 7)]
)
def test_a_run_that_was_restarted_goes_on_from_what_it_has_saved_itself(saved, monkeypatch, resume, attempt, step):
    monkeypatch.setenv("HVDLAUNCH_ATTEMPT", attempt)
    made = saved(resume=resume)
    assert (made.resume_from and made.resume_from.step) == step
    assert (made.path / "checkpoints" / "step-000000007").exists() == (step is not None)


def test_what_a_run_writes_from_then_on_is_its_owners_alone(saved):
    made = saved()
    (made.path / "written").touch()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made.path, made.path / "ranks", made.path / "written")]
    assert modes == [0o700, 0o700, 0o600]
