"""A checkpoint from a stranger cannot run code, nor read or write other files."""

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.files import MANIFEST, find_newest, load
from tests.refusals import refused, require_facts
from tests.unit.checkpoint.checkpoints import put


def forged(root, content, name="state.pt", **manifest):
    """A checkpoint of these bytes with a valid manifest, except for the given entries."""
    folder = root / "step-000000007"
    folder.mkdir()
    if Path(name).name == name:
        (folder / name).write_bytes(content)
    files = {name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    facts = {"format": checkpoint.FORMAT, "step": 7, "about": {}, "files": files, **manifest}
    (folder / MANIFEST).write_bytes(checkpoint._seal(facts))
    return folder


class Runs:
    """Calls a function if it is unpickled without care."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def zipped(**records):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name.replace('_pkl', '.pkl')}", content)
    return packed.getvalue()


def saved(value, **options):
    packed = io.BytesIO()
    torch.save(value, packed, **options)
    return packed.getvalue()


def tarred(payload):
    """The format of torch 0.1, whose pickles were once loaded without weights_only's care."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(payload)
            archive.addfile(entry, io.BytesIO(payload))
    return packed.getvalue()


def payloads(canary):
    touch = f"touch {canary}"
    system, python = Runs(os.system, touch), Runs(exec, f"import os; os.mknod({str(canary)!r})")
    nested = OrderedDict(weights=torch.zeros(2), more=[{"deep": python}])
    stacked = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + bytes([len(touch)]) + touch.encode() + b"\x85R."
    protocol_0 = f"cposix\nsystem\n(S'{touch}'\ntR.".encode()
    return {
        "system": saved(system),
        "exec": saved(python),
        "nested": saved(nested),
        "old format": saved(system, _use_new_zipfile_serialization=False),
        "plain pickle": pickle.dumps(system),
        "tar": tarred(pickle.dumps(system)),
        "TorchScript": zipped(data_pkl=pickle.dumps(system, 2), constants_pkl=pickle.dumps(system, 2), version="3\n"),
        "a name on the stack": zipped(data_pkl=stacked, version="3\n", byteorder="little"),
        "protocol 0": zipped(data_pkl=protocol_0, version="3\n", byteorder="little"),
        "no pickle": b"\x00" * 100,
    }


@pytest.mark.parametrize("weakened", ["torch's own switch", "the look beforehand"])
@pytest.mark.parametrize("kind", payloads("x"))
def test_a_strangers_checkpoint_runs_no_code_and_either_of_two_guards_is_enough(tmp_path, monkeypatch, kind, weakened):
    if weakened == "torch's own switch":
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    else:
        monkeypatch.setattr(checkpoint, "get_unsafe_globals_in_checkpoint", lambda _: [])
    canary = tmp_path / "ran"
    folder = forged(tmp_path, payloads(canary)[kind])
    found, _ = find_newest(tmp_path)
    line = refused(lambda: load(found, "state"))
    assert not canary.exists()
    require_facts(line, f"{folder / 'state.pt'}: rejected ( ... another --run")
    assert "weights_only" not in line


def test_the_payloads_do_run_without_care(tmp_path):
    for kind in ("system", "exec", "nested", "old format", "a name on the stack", "protocol 0"):
        canary = tmp_path / kind.replace(" ", "-")
        torch.load(io.BytesIO(payloads(canary)[kind]), weights_only=False)
        assert canary.exists(), kind


@pytest.mark.parametrize(
    "name",
    ["../../x.pt", "/etc/passwd", "..", MANIFEST, "x.pt\n", "é.pt", "", "ranks/../x.pt", "ranks/01.pt", "ranks/"],
)
def test_a_manifest_that_names_other_files_is_refused(tmp_path, name):
    (tmp_path / "x.pt").write_bytes(saved({}))
    (tmp_path / "root").mkdir()
    forged(tmp_path / "root", saved({}), files={name: {"size": 1, "sha256": "0" * 64}})
    found, [reason] = find_newest(tmp_path / "root")
    assert found is None
    assert f"names {name!r}" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "change",
    [
        {"format": checkpoint.FORMAT + 1},
        {"step": 8},
        {"step": "7"},
        {"about": 3},
        {"files": []},
        {"files": {"state.pt": 3}},
        {"files": {"state.pt": {"size": 10**30, "sha256": ""}}},
        {"files": {"state.pt": {"size": -1, "sha256": ""}}},
    ],
)
def test_a_manifest_that_is_sealed_but_wrong_is_refused(tmp_path, change):
    forged(tmp_path, b"abc", **change)
    found, [reason] = find_newest(tmp_path)
    assert found is None
    assert "\n" not in reason


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 500_000, b"\xff\xfe\x00", b'{"sha256": NaN}'])
def test_content_that_is_not_a_manifest_is_refused(tmp_path, content):
    folder = forged(tmp_path, b"abc")
    (folder / MANIFEST).write_bytes(content)
    found, [reason] = find_newest(tmp_path)
    assert found is None
    assert f"{folder / MANIFEST} is damaged" in reason


@pytest.mark.parametrize("name", ["", MANIFEST, "state.pt", "ranks", "ranks/0.pt"])
def test_symbolic_links_are_refused(tmp_path, name):
    [folder] = put(tmp_path / "root", 7)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    found, [reason] = find_newest(tmp_path / "root")
    assert found is None
    assert "is a symbolic link" in reason or "is not a regular file" in reason


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    [folder] = put(tmp_path, 7)
    (folder / "state.pt").unlink()
    os.mkfifo(folder / "state.pt")
    assert find_newest(tmp_path) == (None, [f"{folder / 'state.pt'} is not a regular file"])


def test_being_out_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch):
    put(tmp_path, 7)
    monkeypatch.setattr(torch, "load", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        load(find_newest(tmp_path)[0], "state")
