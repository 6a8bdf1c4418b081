import errno
import io
import json
import os

import pytest

from hvdtrain.safety import files
from hvdtrain.safety.files import write_atomically
from hvdtrain.safety.guard import LOG_WRITE, Guard
from hvdtrain.tracking import files as logfiles
from hvdtrain.tracking.files import RecordFile, write_json


class Disk:
    """A disk with `free` bytes; like a real one, a write takes what still fits."""

    def __init__(self, monkeypatch):
        self.free = 10**9
        self.error = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(logfiles.os, "write", self.write)

    def write(self, descriptor, data):
        if not self.free:
            raise OSError(self.error, os.strerror(self.error))
        taken = self._write(descriptor, data[: self.free])
        self.free -= taken
        return taken


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_full_disk_tears_no_record_and_late_records_come_in_order(tmp_path, disk, capsys):
    guard = Guard()
    file = RecordFile(tmp_path / "f", guard)
    file.append(b"one\n")
    disk.free = 2
    for record in (b"two\n", b"three\n", b"four\n"):
        file.append(record)
        assert (tmp_path / "f").read_bytes() == b"one\n"
        disk.free = 2
    assert guard.counts[LOG_WRITE] == 3
    disk.free = 100
    file.append(b"five\n")
    assert (tmp_path / "f").read_bytes() == b"one\ntwo\nthree\nfour\nfive\n"
    assert guard.counts[LOG_WRITE] == 3
    file.close()
    file.append(b"too late\n")
    assert (tmp_path / "f").read_bytes() == b"one\ntwo\nthree\nfour\nfive\n"
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"hvdtrain: warning: log write failed: {tmp_path / 'f'}: No space left on device; training continues"


def test_so_many_records_wait_for_the_end_and_the_oldest_are_lost(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(logfiles, "MAX_PENDING_RECORDS", 3)
    file = RecordFile(tmp_path / "f", Guard())
    disk.free = 0
    for number in range(5):
        file.append(b"%d\n" % number)
    disk.free = 100
    file.close()
    assert (tmp_path / "f").read_bytes() == b"2\n3\n4\n"


def test_a_file_that_cannot_be_opened_yet_is_opened_later(tmp_path):
    guard = Guard()
    file = RecordFile(tmp_path / "later" / "f", guard)
    file.append(b"one\n")
    assert guard.counts[LOG_WRITE] == 2
    (tmp_path / "later").mkdir()
    file.append(b"two\n")
    file.close()
    assert (tmp_path / "later" / "f").read_bytes() == b"one\ntwo\n"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_part(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    write_json(path, {"old": True})

    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    def full(path):
        path.write_bytes(b"new")
        return Full()

    monkeypatch.setattr(files, "new_file", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new content")
    assert json.loads(path.read_text()) == {"old": True}
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]
