import fcntl
import os
import re
import stat
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint import run_folder
from hvdtrain.checkpoint.run_folder import has_checkpoints, open_on_all
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.program.checks import open_folder
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision.data import with_choices
from hvdtrain.tasks.vision.settings import EffnetSettings
from tests.ranks import together
from tests.refusals import refused, require_facts
from tests.unit.checkpoint.checkpoints import left

METADATA = {
    "np": 1,
    "global_batch": 1,
    "samples": 7,
    "unit": "images",
    "config": {"epochs": 2, "global_batch_size": None},
}


def opened(folder, *, comm=None, samples=7, resume_from=None):
    """Open it for a run on so many images, and release its lock."""
    comm = comm or SerialComm()
    settings = SimpleNamespace(
        runs_dir=folder.parent,
        run_names=("", folder.name),
        overwrite=False,
        resume_from=resume_from,
    )
    config = {**METADATA["config"], "resume_from": resume_from}
    made = open_on_all(comm, settings, {**METADATA, "np": comm.size, "samples": samples, "config": config})
    if made.lock is not None:
        os.close(made.lock.descriptor)
    return made


@pytest.fixture
def begun(tmp_path):
    """The folder of a run that has failed after it saved these steps, by so many ranks."""

    def make(*steps, ranks=1):
        folder = opened(tmp_path / "effnet" / "r").path
        own = {f"ranks/{rank}": {"rank": rank} for rank in range(ranks)}
        for step in steps:
            counted = {"best_accuracy": 0.5, "eval_loss": 1}
            metadata = {
                **METADATA,
                "np": ranks,
                "tracker": {"result": counted},
                "position": {"step": step, "epoch": 0, "visited": 1},
            }
            checkpoint.write(folder / "checkpoints", step, {"state": {"step": step}, **own}, metadata=metadata)
        (folder / "result.json").write_text('{"exit_reason": "failed"}')
        (folder / "metrics.jsonl").write_text("kept")
        return folder

    return make


def opened_by_program(runs_dir, **settings):
    """As a program opens it, of one rank."""
    job = SimpleNamespace(
        comm=SerialComm(),
        sizes=BatchSizes(micro_batch=256, global_batch=256, steps_per_epoch=1),
        task=SimpleNamespace(unit="images"),
        optimizer_name=None,
        length_option="--epochs",
        data=None,
        train=Resident(images=torch.zeros(1)),
    )
    umask = os.umask(0o022)
    try:
        made = open_folder(EffnetSettings(runs_dir=runs_dir, **settings), job)
        (made.path / "written").touch()
    finally:
        os.umask(umask)
    os.close(made.lock.descriptor)
    return made.path


def test_run_folder_is_the_named_one_or_one_by_date_and_time_and_its_owners_alone(tmp_path):
    named = tmp_path / "try" / "first"
    (named / "ranks").mkdir(parents=True)
    named.chmod(0o755)  # as others may have made it
    assert opened_by_program(tmp_path, run="try/first") == named
    folder = opened_by_program(tmp_path, run="try/")
    assert folder.parent == tmp_path / "try"
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    for path in (named, folder):
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path / "ranks", path / "written")]
        assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("job", ["../../../x", "..", ".hidden", "a\x1b[2J"])
def test_a_run_that_the_launcher_names_stays_in_its_experiments_folder(tmp_path, monkeypatch, job):
    monkeypatch.setenv("HVDLAUNCH_JOB", job)
    with pytest.raises(BadInput, match=r"^HVDLAUNCH_JOB='.*': not a plain name") as refused:
        opened_by_program(tmp_path / "runs")
    assert str(refused.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_whether_a_run_has_left_a_checkpoint(begun, monkeypatch):
    experiment = begun(7).parent
    assert [has_checkpoints(experiment, run) for run in ("r", "other", None)] == [True, False, False]
    monkeypatch.setenv("HVDLAUNCH_JOB", "r")
    assert has_checkpoints(experiment, None)


def test_the_stem_has_the_stride_for_the_images_or_that_of_the_run_that_goes_on(begun, tmp_path):
    def stride(pixels, run="r", **changes):
        config = EffnetSettings(runs_dir=tmp_path, run=run, **changes)
        return with_choices(SerialComm(), config, SimpleNamespace(height=pixels, train=[])).stem_stride

    folder = begun(7)
    assert [stride(pixels) for pixels in (8, 32, 33, 224)] == [1, 1, 2, 2]
    assert [stride(32, pretrained=source) for source in ("hub", "weights.pt")] == [2, 1]
    (folder / "config.json").write_text('{"stem_stride": 2}')
    assert [stride(8), stride(8, "other"), stride(8, None)] == [2, 1, 1]
    (folder / "result.json").write_text('{"exit_reason": "finished"}')
    assert stride(8) == 1


# --- going on


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_goes_back_once_and_keeps_what_is_newer(begun, finished):
    folder = begun(3, 6, 9)
    checkpoint.write(folder / "checkpoints", 9, {"weights": {}}, metadata={}, kind="best")
    if finished:
        (folder / "result.json").write_text('{"exit_reason": "finished"}')
    before = left(folder)
    made = together(2, lambda comm: opened(folder, comm=comm, resume_from=3))
    assert [one.resume_from.step for one in made] == [3, 3]
    assert [one.resume_from.metadata["tracker"]["result"] for one in made] == [
        {"best_accuracy": None, "eval_loss": 1}
    ] * 2
    again = opened(folder)  # a restart before the next checkpoint
    assert again.resume_from.metadata["tracker"]["result"]["best_accuracy"] is None
    moved = left(folder / "after-3-1")
    assert moved["metrics.jsonl"] == b"kept"
    assert {name for name in before if "000000006" in name or "000000009" in name} < moved.keys()
    assert {name.split("/")[1] for name in left(folder) if name.startswith("checkpoints/")} == {"step-000000003"}
    # The same command continues; with other settings the run goes back again.
    metadata = {**METADATA, "config": made[0].metadata["config"], "position": {"step": 12, "epoch": 0, "visited": 1}}
    metadata["tracker"] = {"result": {}}
    checkpoint.write(folder / "checkpoints", 12, {"state": {}, "ranks/0": {}}, metadata={**metadata, "np": 1})
    assert opened(folder, resume_from=3).resume_from.step == 12
    assert opened(folder, resume_from=12).resume_from.step == 12
    assert left(folder / "after-3-1") == moved


@pytest.mark.parametrize(("steps", "found"), [((), "none"), ((6, 9), "those of steps 6, 9")])
def test_a_step_without_a_checkpoint_is_refused_before_anything_is_touched(begun, steps, found):
    folder = begun(*steps)
    before = left(folder)
    require_facts(refused(lambda: opened(folder, resume_from=3)), f"--resume-from 3 ... {folder} ... {found}")
    assert left(folder) == before


def test_a_run_that_was_restarted_goes_on_from_its_newest_checkpoint(begun, monkeypatch):
    monkeypatch.setenv("HVDLAUNCH_RANK", '{"restart": 1}')
    assert opened(begun(3, 7), resume_from=3).resume_from.step == 7


def test_a_run_that_has_saved_nothing_starts_anew(begun):
    assert left(opened(begun()).path) == {}


def test_a_run_that_was_restarted_waits_until_the_attempt_before_it_has_died(begun, monkeypatch):
    folder = begun(7)
    dying = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(dying, fcntl.LOCK_EX)
    monkeypatch.setenv("HVDLAUNCH_RANK", '{"restart": 1}')
    monkeypatch.setattr(run_folder.folder, "time", Mock(wraps=time, sleep=lambda _: os.close(dying)))
    assert opened(folder).resume_from.step == 7


@pytest.mark.parametrize(
    ("torn", "samples", "line"), [(True, 7, "another --run"), (False, 8, "training images: .* 7, now there are 8")]
)
def test_a_run_that_cannot_go_on_is_left_as_it_is(begun, torn, samples, line):
    folder = begun(3)
    (folder / "ranks" / "rank-0.err").write_text("its last words")
    if torn:
        (folder / "checkpoints" / "step-000000003" / "state.pt").write_bytes(b"torn")
    before = left(folder)
    for _ in range(2):  # and its lock is free again
        with pytest.raises(BadInput, match=line):
            opened(folder, samples=samples)
    assert left(folder) == before


# --- several ranks


@pytest.mark.parametrize(("ranks", "size", "torn"), [(1, 1, "state"), (3, 3, "ranks/1"), (3, 2, "ranks/2")])
def test_a_file_that_is_damaged_for_one_rank_is_passed_over_by_all(begun, capsys, ranks, size, torn):
    """Also if they are of another number of ranks; then rank 0 looks at all of them."""
    folder = begun(3, 6, ranks=ranks)
    file = folder / "checkpoints" / "step-000000006" / f"{torn}.pt"
    file.write_bytes(b"torn")
    made = together(size, lambda comm: opened(folder, comm=comm))
    assert [(one.resume_from.step, one.apart) for one in made] == [(3, [])] * size
    [line] = capsys.readouterr().err.splitlines()
    require_facts(line, f"hvdtrain: warning: ... {file} is damaged: 4 bytes ... skipping this checkpoint")
    assert not (folder / "result.json").exists()
    assert (folder / "metrics.jsonl").read_text() == "kept"


def test_a_rank_on_another_disk_goes_on_from_the_same_checkpoint(begun, tmp_path, monkeypatch):
    folder = begun(3, ranks=2)
    monkeypatch.setattr(run_folder, "LATE_S", 0.2)

    def on_its_own_disk(comm):
        return opened(folder if comm.rank == 0 else tmp_path / "other" / "run", comm=comm)

    made = together(2, on_its_own_disk)
    assert [(one.resume_from.step, one.apart) for one in made] == [(3, [1])] * 2
