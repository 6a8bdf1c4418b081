"""The disk that holds the runs fills up while they train."""

import re
import subprocess

import pytest

from tests.mpi.interrupted import WHOLE, files_under, same_end

KIB = 1024


@pytest.fixture
def disk(tmp_path):
    """Make runs/ a file system of so many KiB; once more gives it another size."""
    folder = tmp_path / "runs"
    folder.mkdir()
    sizes = []

    def resize(kib):
        options = f"size={kib * KIB}" + (",remount" if sizes else "")
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        sizes.append(kib)

    yield resize
    if sizes:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_without_room_for_a_second_checkpoint(runs, reference, disk):
    """The training goes on, the first one stays, and with room again the run goes on from it as if nothing was."""
    disk(2000)
    words = (*WHOLE, "--checkpoint-every", "4steps")
    run = runs(2, words)
    run.killed("step6", saved=4)
    saved = files_under(run.path / "checkpoints")
    said = run.finish(status=1, HVDTRAIN_FAULT="raise@rankall:step21")
    warnings = [line for line in said.splitlines() if "write failed" in line]
    assert len(warnings) == 1
    assert re.search(r"checkpoint write failed: .*: No space left on device.*; training continues", warnings[0])
    left = files_under(run.path / "checkpoints")
    assert {name: one for name, one in left.items() if not name.startswith(("best", ".step-000000020"))} == saved
    assert (run.result["steps"], run.result["exit_reason"]) == (20, "failed")
    assert run.result["checkpoint_write_failures"] in (3, 4)  # steps 8, 12, 16, and 20 if that was in time
    assert run.result["log_write_failures"] == 0

    disk(64_000)
    run.finish()
    same_end(run, reference(2, words))
    assert not list(run.path.rglob(".*.part"))
    assert run.result["checkpoint_write_failures"] == 0  # what came after the checkpoint is forgotten
