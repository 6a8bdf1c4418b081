import contextlib
import errno
import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint.files import FORMAT, MANIFEST, clean, find_newest, load, open_one, write
from hvdtrain.checkpoint.writer import Writer
from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.guard import Guard
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


def test_the_manifest_has_sizes_and_hashes(tmp_path):
    [folder] = put(tmp_path, 3)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"], manifest["about"]) == (FORMAT, 3, {"epoch": 3})
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_tensors_come_back_bit_by_bit_and_with_their_layout(tmp_path):
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    state = OrderedDict(images=images, half=odd.bfloat16(), odd=odd, none=None, pair=(1, 2.5), bytes=b"\0\xff")
    writer = Writer(tmp_path, keep=1, guard=Guard(), on_commit=int)
    writer.begin(1)
    writer.save(1, {"state": state}, {}, {})
    writer.wait()
    content = load(find_newest(tmp_path)[0], "state")
    assert content["images"].stride() == images.stride()
    for name in ("images", "half", "odd"):
        assert content[name].dtype == state[name].dtype
        assert torch.equal(content[name].contiguous().view(torch.uint8), state[name].contiguous().view(torch.uint8))
    assert (content["none"], content["pair"], content["bytes"]) == (None, (1, 2.5), b"\0\xff")


def test_about_comes_back_as_json_has_it(tmp_path):
    about = {"é": [1, None, 0.1, float("inf")], "by rank": {10: "a", 9: "b"}, "pair": (1, 2)}
    write(tmp_path, 1, {}, about=about)
    assert find_newest(tmp_path)[0].about == json.loads(json.dumps(about))


@pytest.mark.parametrize("value", [np.float64(1), np.zeros(2), Path("x"), torch.nn.Linear(1, 1), {1: [object]}])
def test_what_could_not_be_loaded_again_is_refused_when_it_is_written(tmp_path, value):
    put(tmp_path, 1)
    with pytest.raises(TypeError, match=r"document state holds \['[a-z]"):
        write(tmp_path, 2, {"state": {"value": value}}, about={})
    assert names(tmp_path) == ["step-000000001"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    [folder] = put(tmp_path, 5)
    (folder / "state.pt").write_bytes(b"torn")
    (folder / "more.pt").write_bytes(b"")
    put(tmp_path, 5)
    assert is_whole(find_newest(tmp_path)[0], 5)
    assert names(tmp_path) == ["step-000000005"]
    assert sorted(files_under(folder)) == [MANIFEST, "ranks/0.pt", "state.pt"]


def test_no_folder_or_an_empty_one_has_no_checkpoint(tmp_path):
    assert find_newest(tmp_path) == find_newest(tmp_path / "none") == (None, [])
    clean(tmp_path / "none")


def test_other_names_are_not_checkpoints(tmp_path):
    put(tmp_path, 1)
    for name in ("step-2", "step-0000000003", "step-000000004x", "best-000000005", ".step-000000006.part", "x"):
        (tmp_path / "step-000000001").rename(tmp_path / name)
        assert find_newest(tmp_path) == (None, [])
        (tmp_path / name).rename(tmp_path / "step-000000001")


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
@pytest.mark.parametrize("part", [0, 0.5, 0.999])
def test_a_truncated_file_is_passed_over(tmp_path, name, part):
    reason = damaged(tmp_path, lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * part)))
    assert (" bytes instead of " if name != MANIFEST else "damaged") in reason


@pytest.mark.parametrize("name", ["state.pt", "ranks/0.pt", MANIFEST])
def test_a_longer_file_is_passed_over(tmp_path, name):
    damaged(tmp_path, lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\n"))


def test_a_missing_manifest_file_or_everything_is_passed_over(tmp_path):
    for name in (MANIFEST, "state.pt"):
        reason = damaged(tmp_path / name, lambda folder, name=name: (folder / name).unlink())
        assert reason.endswith(f"{name} cannot be read (No such file or directory)")
    damaged(tmp_path / "all", lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()])


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
    for bit in range(0, bits, bits // 97):
        flip(file, bit)
        assert find_newest(tmp_path) == (None, [f"{file} is damaged: its SHA-256 differs from the manifest's"])
        with pytest.raises(BadInput, match=r"damaged.*another --run"):
            load(found, name)
        flip(file, bit)
    assert find_newest(tmp_path) == (found, [])


def test_any_flipped_bit_of_the_manifest_is_seen(tmp_path):
    [folder] = put(tmp_path, 1)
    for bit in range(0, (folder / MANIFEST).stat().st_size * 8, 11):
        flip(folder / MANIFEST, bit)
        assert find_newest(tmp_path)[0] is None, bit
        with pytest.raises(BadInput, match="damaged"):
            open_one(folder)
        flip(folder / MANIFEST, bit)
    assert is_whole(find_newest(tmp_path)[0], 1)


def test_what_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    read = Path.read_bytes

    def broken(path):
        if path.parent.name == "step-000000003":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", broken)
    assert damaged(tmp_path, lambda _: None).endswith("cannot be read (Input/output error)")


# --- failures while writing


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_whichever_call_fails_nothing_has_changed(tmp_path, monkeypatch, name, replaced):
    """The calls after it work again, so that undoing can succeed."""
    step, failures = 2 if replaced else 3, 0
    for at in range(1, 100):
        root = tmp_path / str(at)
        put(root, 1, 2)
        before, written = files_under(root), False
        with monkeypatch.context() as patch, contextlib.suppress(OSError):
            calls = break_call(patch, name, errno.EIO, first=at, last=at)
            put(root, step)
            written = True
        if written:
            assert is_whole(find_newest(root)[0], step)
        else:
            failures += 1
            assert files_under(root) == before, at
            assert names(root) == ["step-000000001", "step-000000002"], at
        if len(calls) < at:
            break
    assert failures >= {"mkdir": 1, "rename": 1 + replaced}.get(name, 5)


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


@pytest.mark.parametrize(("of", "size", "own"), [(2, 2, True), (4, 2, False), (4, 4, False), (None, 2, True)])
def test_files_of_the_first_ranks_of_many_are_not_those_of_a_few(tmp_path, of, size, own):
    """Two of four ranks saw the folder: a run of two that goes on is not the one that saved."""
    folder = write(tmp_path, 3, {"state": {}, "ranks/0": {}, "ranks/1": {}}, about={} if of is None else {"np": of})
    assert open_one(folder).is_complete_for(size) == own
