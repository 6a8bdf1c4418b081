"""What a run leaves is its owner's alone and holds no secret; nothing of ours listens; strangers' files run no code."""

import copy
import hashlib
import os
import secrets as random
import shutil
import sys
from pathlib import Path

import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi import launched
from tests.mpi.conftest import EFFNET, QUICK, left_in, wait_until
from tests.mpi.launched import argv
from tests.mpi.secrets import NAMES, listening, on_command_lines, open_to_others, told, watched
from tests.unit.checkpoint.test_strangers import payloads

RUN = Path("runs/effnet/r")
SAVED = [*EFFNET, *QUICK, "--run", "r", "--checkpoint-every", "4steps"]
TRAIN = [*SAVED, "--images=1024", "--batch-size-per-rank", "32", "--profile", "trace:2"]  # 16 steps
LEFT = {
    *("config.json", "environment.json", "placement.json", "metrics.jsonl", "result.json", "phases.json", "lock"),
    *("phases.png", "rank-0.json", "rank-1.json", "rank-1.at", "rank-1.pt.trace.json.gz", "manifest.json", "state.pt"),
}


@pytest.fixture
def secret():
    return f"canary-{random.token_hex(8)}"


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module", autouse=True)
def _files_that_others_may_read():
    before = os.umask(0o022)
    yield
    os.umask(before)


def started(folder, words, secret, **more):
    """In `folder`, with the secret in its environment."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {**dict.fromkeys(NAMES, secret), **AS_ROOT, "TMPDIR": str(folder / "tmp"), **more}
    return launched.started(folder, words, **own)


@pytest.mark.slow
def test_a_run_that_fails_and_goes_on_tells_no_secret_and_listens_nowhere(tmp_path, secret):
    words = argv("--restarts", "1", "-x", "WANDB_API_KEY", program=[sys.executable, *TRAIN])
    with started(tmp_path, words, secret, HVDTRAIN_FAULT="raise@rank1:step5") as job:
        said, heard, wrote = watched(
            lambda: job.poll() is None,
            lambda: on_command_lines(secret),
            lambda: listening(tmp_path),
            lambda: set(told(secret, tmp_path / "tmp")),
        )
    assert job.returncode == 0, (tmp_path / "out").read_text()
    assert said == set()
    assert wrote == set()
    assert {program for program, _ in heard} == {"mpirun"}  # its daemon's: no option of Open MPI 4 binds it
    assert "resumed from" in (tmp_path / "out").read_text()
    wait_until(lambda: not left_in(tmp_path), 5)
    left = {path.name for path in (tmp_path / RUN).rglob("*")}
    assert left >= LEFT, left
    assert any(name.startswith("events.out.tfevents.") for name in left)
    assert open_to_others(tmp_path / "runs") == []
    assert told(secret, tmp_path) == []


@pytest.fixture(scope="module")
def torn_off(tmp_path_factory):
    """A run by one process that has ended at step 14, so that the checkpoint of step 8 is whole."""
    folder = tmp_path_factory.mktemp("torn")
    with started(folder, [sys.executable, *SAVED], "", HVDTRAIN_FAULT="raise@rank0:step14") as job:
        assert job.wait(100) == 1, (folder / "out").read_text()
    return folder


def resumed(folder, torn_off):
    """The same command once more, in a copy with what a stranger has put there; status and what it said."""
    shutil.copytree(torn_off / "runs", folder / "runs", symlinks=True, dirs_exist_ok=True)
    with started(folder, [sys.executable, *SAVED], "") as job:
        status = job.wait(100)
    return status, (folder / "out").read_text()


def forge(folder, torn_off, step, *, state=None, change=lambda _: None):
    """The newest true checkpoint as one of a later step, with another content and a manifest that is right for it."""
    true = checkpoint.open_one(torn_off / RUN / "checkpoints/step-000000008")
    forged = folder / RUN / f"checkpoints/step-{step:09d}"
    shutil.copytree(true.folder, forged)
    if state is not None:
        (forged / "state.pt").write_bytes(state)
    about = copy.deepcopy(true.metadata)
    change(about)
    files = {
        str(path.relative_to(forged)): {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path in forged.rglob("*.pt")
        for content in [path.read_bytes()]
    }
    facts = {"format": checkpoint.FORMAT, "step": step, "about": about, "files": files}
    (forged / checkpoint.MANIFEST).write_bytes(checkpoint._seal(facts))
    return forged


def test_a_run_does_not_begin_from_a_strangers_checkpoint_that_would_run_code(tmp_path, torn_off):
    canary = tmp_path / "ran"
    forged = forge(tmp_path, torn_off, 99, state=payloads(canary)["system"])
    status, said = resumed(tmp_path, torn_off)
    assert (status, said.count("\n")) == (2, 1), said
    assert said.startswith(f"hvdtrain: error: {forged.relative_to(tmp_path)}/state.pt: rejected (")
    assert not canary.exists()


@pytest.mark.slow
def test_a_strangers_run_folder_leads_to_no_file_of_ours(tmp_path, torn_off):
    ours = tmp_path / "ours"
    ours.write_text("keep me")

    def lead_there(about):
        about["tracker"] |= {"events_file": str(ours), "events_bytes": 0}

    forge(tmp_path, torn_off, 13, change=lead_there)
    status, said = resumed(tmp_path, torn_off)
    assert "step-000000013" in said
    assert status == 0, said
    assert ours.read_text() == "keep me"
