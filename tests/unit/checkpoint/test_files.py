import contextlib
import errno
import os
import signal

import numpy as np
import pytest

from hvdtrain.checkpoint.files import MANIFEST, clean, find_newest, load, open_one, write
from hvdtrain.settings.safety.exits import BadInput
from tests.unit.checkpoint.checkpoints import CALLS, break_call, files_under, is_whole, names, put

# --- writing and finding


def test_what_was_written_is_found_and_loaded(tmp_path):
    [folder] = put(tmp_path / "new" / "checkpoints", 12)
    assert folder == tmp_path / "new" / "checkpoints" / "step-000000012"
    found, passed_over = find_newest(folder.parent)
    assert (found.folder, passed_over, sorted(found.files)) == (folder, [], ["ranks/0.pt", "state.pt"])
    assert is_whole(found, 12)
    assert open_one(folder) == found
    assert names(folder.parent) == ["step-000000012"]


def test_a_checkpoint_is_for_its_owner_alone(tmp_path):
    [folder] = put(tmp_path / "checkpoints", 1)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700, 0o700]
    assert (folder / "ranks").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize("value", [np.zeros(2), {1: [object]}])
def test_what_could_not_be_loaded_again_is_refused_when_it_is_written(tmp_path, value):
    put(tmp_path, 1)
    with pytest.raises(TypeError, match=r"document state holds \['[a-z]"):
        write(tmp_path, 2, {"state": {"value": value}}, metadata={})
    assert names(tmp_path) == ["step-000000001"]


def test_no_folder_an_empty_one_and_other_names_have_no_checkpoint(tmp_path):
    assert find_newest(tmp_path) == find_newest(tmp_path / "none") == (None, [])
    clean(tmp_path / "none")
    [folder] = put(tmp_path, 1)
    for name in ("step-2", "step-000000004x", "best-000000005", ".step-000000006.part"):
        folder = folder.rename(tmp_path / name)
        assert find_newest(tmp_path) == (None, [])


# --- damage


def damaged(root, damage):
    """Damage the third of three checkpoints; the reason why `find_newest` passes it over for the second."""
    folder = put(root, 1, 2, 3)[-1]
    damage(folder)
    found, [reason] = find_newest(root)
    assert is_whole(found, 2)
    assert str(folder) in reason
    assert "\n" not in reason
    return reason


@pytest.mark.parametrize("name", ["state.pt", "ranks/0.pt", MANIFEST])
def test_a_truncated_and_a_longer_file_are_passed_over(tmp_path, name):
    reason = damaged(tmp_path / "short", lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1))
    assert (" bytes instead of " if name != MANIFEST else "damaged") in reason
    damaged(tmp_path / "long", lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\n"))


@pytest.mark.parametrize("name", ["state.pt", MANIFEST])
def test_a_missing_file_is_passed_over(tmp_path, name):
    reason = damaged(tmp_path, lambda folder: (folder / name).unlink())
    assert reason.endswith(f"{name} cannot be read (No such file or directory)")


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state", "ranks/0"])
def test_one_flipped_bit_of_a_file_is_seen_by_newest_and_by_load(tmp_path, name):
    [folder] = put(tmp_path, 1)
    found, _ = find_newest(tmp_path)
    file = folder / f"{name}.pt"
    bits = file.stat().st_size * 8
    for bit in range(0, bits, bits // 9):
        flip(file, bit)
        assert find_newest(tmp_path) == (None, [f"{file} is damaged: its SHA-256 differs from the manifest's"])
        with pytest.raises(BadInput, match=r"damaged.*another --run"):
            load(found, name)
        flip(file, bit)
    assert find_newest(tmp_path) == (found, [])


def test_any_flipped_bit_of_the_manifest_is_seen(tmp_path):
    [folder] = put(tmp_path, 1)
    for bit in range(0, (folder / MANIFEST).stat().st_size * 8, 101):
        flip(folder / MANIFEST, bit)
        assert find_newest(tmp_path)[0] is None, bit
        flip(folder / MANIFEST, bit)
    assert is_whole(find_newest(tmp_path)[0], 1)


# --- failures while writing


@pytest.mark.parametrize("name", CALLS)
def test_whichever_call_fails_nothing_has_changed(tmp_path, monkeypatch, name):
    """A checkpoint is replaced; the calls after the failing one work again, so that undoing can succeed."""
    failures = 0
    for at in range(1, 100):
        root = tmp_path / str(at)
        put(root, 1, 2)
        before, written = files_under(root), False
        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            calls = break_call(patch, name, errno.EIO, first=at, last=at)
            put(root, 2, kib=12)
            written = True
        if written:
            assert is_whole(find_newest(root)[0], 2)
        else:
            failures += 1
            assert files_under(root) == before, at
            assert names(root) == ["step-000000001", "step-000000002"], at
        if len(calls) < at:
            break
    assert failures >= {"mkdir": 1, "rename": 2}.get(name, 5)


@pytest.mark.parametrize("name", CALLS)
def test_a_process_that_is_killed_at_whichever_call_loses_no_checkpoint(tmp_path, name):
    """It is replacing one."""
    at, status = 0, None
    while status != 0:
        at += 1
        root = tmp_path / str(at)
        put(root, 1, 2)
        if not (pid := os.fork()):
            try:
                break_call(pytest.MonkeyPatch(), name, None, first=at)
                put(root, 2, kib=12)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        clean(root)
        assert [find_newest(root)[1], names(root)] == [[], ["step-000000001", "step-000000002"]], at
        assert is_whole(find_newest(root)[0], 2)
    assert at > {"mkdir": 1, "rename": 2}.get(name, 5)


def test_what_killed_processes_left_is_removed_and_put_back(tmp_path):
    put(tmp_path, 1, 2, 3)
    (tmp_path / "step-000000001").rename(tmp_path / ".step-000000001.part")
    (tmp_path / ".best-000000001.part").mkdir()
    (tmp_path / "step-000000003").rename(tmp_path / ".step-000000003.old")
    (tmp_path / ".step-000000002.old").mkdir()
    assert find_newest(tmp_path)[0].step == 2
    clean(tmp_path)
    assert names(tmp_path) == ["step-000000002", "step-000000003"]
    assert is_whole(find_newest(tmp_path)[0], 3)


@pytest.mark.parametrize(("of", "size", "own"), [(2, 2, True), (4, 2, False), (4, 4, False)])
def test_files_of_the_first_ranks_of_many_are_not_those_of_a_few(tmp_path, of, size, own):
    """Two of four ranks saw the folder: a run of two that goes on is not the one that saved."""
    folder = write(tmp_path, 3, {"state": {}, "ranks/0": {}, "ranks/1": {}}, metadata={"np": of})
    assert open_one(folder).is_complete_for(size) == own
