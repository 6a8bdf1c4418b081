import os
import re
import stat
from dataclasses import asdict

import pytest

from hvdtrain.checkpoint import changes
from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import BadInput
from hvdtrain.train.order import BatchSizes
from hvdtrain.train.preflight import open_folder
from hvdtrain.vision.config import EffnetConfig


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def saved(tmp_path, umask):
    """A run with a checkpoint of step 7; the function opens its folder once more, with other settings."""
    folder = tmp_path / "effnet" / "r"
    (folder / "ranks").mkdir(parents=True)
    about = {
        **changes.about(asdict(EffnetConfig()), np=1, global_batch=256, samples=100, unit="images"),
        "position": {"step": 7, "epoch": 0, "visited": 70},
    }
    checkpoint.write(folder / "checkpoints", 7, {"state": {}}, about=about)

    def opened(samples=100, **settings):
        config = EffnetConfig(runs_dir=tmp_path, run="r", **settings)
        sizes = BatchSizes(micro_batch=256, global_batch=256, steps_per_epoch=1)
        made = open_folder(SerialComm(), config, sizes, samples=samples, unit="images")
        os.close(made.opened.lock)
        return made

    return opened


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


def test_run_folder_is_the_named_one_or_one_by_date_and_time(tmp_path, umask):
    def opened(run):
        config = EffnetConfig(runs_dir=tmp_path, experiment="try", run=run)
        sizes = BatchSizes(micro_batch=256, global_batch=256, steps_per_epoch=1)
        return open_folder(SerialComm(), config, sizes, samples=1, unit="images").path

    assert opened("first") == tmp_path / "try" / "first"
    folder = opened(None)
    assert folder.parent == tmp_path / "try"
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    assert (folder / "ranks").is_dir()
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "ranks")} == {0o700}


def test_what_has_changed_is_told_and_other_data_leave_the_folder_as_it_is(saved):
    made = saved(lr=0.5)
    assert made.changes == ["--lr was None, now 0.5: the command line's holds"]
    assert made.about["samples"] == 100
    with pytest.raises(BadInput, match="is of 100 training images, now there are 99"):
        saved(samples=99)
    assert (made.path / "checkpoints" / "step-000000007").exists()
