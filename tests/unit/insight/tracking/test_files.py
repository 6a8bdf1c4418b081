import errno
import os
from types import SimpleNamespace

import pytest

from hvdtrain.insight.tracking import files as logfiles
from hvdtrain.insight.tracking.files import RecordFile
from hvdtrain.settings.safety.guard import LOG_WRITE, Guard


@pytest.fixture
def disk(monkeypatch):
    """A disk with `free` bytes; like a real one, a write takes what still fits."""
    disk, write = SimpleNamespace(free=10**9), os.write

    def write_what_fits(descriptor, data):
        if not disk.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, data[: disk.free])
        disk.free -= taken
        return taken

    monkeypatch.setattr(logfiles.os, "write", write_what_fits)
    return disk


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
