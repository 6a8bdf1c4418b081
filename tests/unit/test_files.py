"""Files that are given or written where others may have planted something."""

import json
import os
import signal

import pytest

from hvdtrain.checkpoint import folder
from hvdtrain.insight.compare import tables as compared
from hvdtrain.insight.tracking.files import RecordFile, reserve, write_reserved
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.files import read_file, shared_file, write_atomically
from hvdtrain.settings.safety.guard import Guard
from launch import files
from launch.advice.tune.windows import read_windows
from launch.cli.files import read
from launch.errors import CommandError
from launch.run.supervise.progress import Metrics
from launch.run.supervise.rank_logs import read_report
from launch.run.supervise.traces.files import read_traces


def report(path):
    os.environ["HVDLAUNCH_REPORT"] = str(path)
    exits.report(run_folder="x")


WRITERS = {
    "launch": lambda path: files.write_whole(path, "new"),
    "record": lambda path: write_atomically(path, b"new"),
    "reserved": lambda path: (reserve(path), write_reserved(path, {})),
    "compare": lambda path: compared.write_all(path.parent, {path.name: b"new"}),
    "report": report,
    "shared": lambda path: shared_file(path, b"new").close(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_planted_link_is_not_followed(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HVDLAUNCH_REPORT", "")
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "out.part").symlink_to(precious)
    WRITERS[name](tmp_path / "out")
    assert precious.read_text() == "keep me"
    assert (tmp_path / "out").is_file()
    assert not (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"]


def test_a_link_that_is_planted_after_room_was_taken_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    reserve(tmp_path / "out")
    (tmp_path / "out.part").unlink()
    (tmp_path / "out.part").symlink_to(precious)
    write_reserved(tmp_path / "out", {"accuracy": 0.5})
    assert precious.read_text() == "keep me"
    assert json.loads((tmp_path / "out").read_text()) == {"accuracy": 0.5}


@pytest.mark.parametrize(("write", "content"), [(files.write_whole, "new"), (write_atomically, b"new")])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, write, content):
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "out", content)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("read", [lambda path: files.read_text(path).encode(), read_file])
def test_a_device_and_a_file_without_end_are_refused(tmp_path, read):
    plain, endless, device = tmp_path / "plain", tmp_path / "endless", tmp_path / "device"
    plain.write_bytes(b"a\r\nb\n")
    with endless.open("wb") as file:
        file.truncate(10 << 30)  # takes no room on the disk
    device.symlink_to("/dev/zero")
    assert read(plain) == b"a\r\nb\n"
    with pytest.raises((OSError, ValueError), match=r"it has more than [0-9]+ MiB"):
        read(endless)
    with pytest.raises((OSError, ValueError), match=r"a device|not a regular file"):
        read(device)


READERS = {
    "launch": files.read_text,
    "hvdtrain": read_file,
    "report": read_report,
    "windows": read_windows,
    "progress": lambda path: (setattr(seen := Metrics(path), "_read_bytes", -1), seen.new()),
    "traces": lambda path: read_traces(path.parent, range(1)),
    "result": lambda path: folder.is_finished(path.parent),
    "own report": report,
    "metrics": lambda path: RecordFile(path, Guard()).append(b"{}"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_that_a_program_has_put_there_holds_nobody(tmp_path, monkeypatch, name):
    def late(*_):
        raise AssertionError("it waits for a writer")

    monkeypatch.setenv("HVDLAUNCH_REPORT", "")
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        for file in ("result.json", "rank-0.err"):
            os.mkfifo(tmp_path / file)
            if name in ("launch", "hvdtrain", "windows"):
                with pytest.raises((OSError, ValueError), match="regular file"):
                    READERS[name](tmp_path / file)
            else:
                READERS[name](tmp_path / file)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_pipe_that_the_user_names_is_read(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"h1 slots=2\n")
    os.close(writer)
    assert read(f"/dev/fd/{reader}")[0] == "h1 slots=2\n"
    os.close(reader)


def test_a_folder_is_one_process_s_and_is_gone_if_nothing_was_written(tmp_path):
    mine = tmp_path / "tunes" / "mine"
    for written in ([], ["tune.json"]):
        with files.held(mine):
            for name in written:
                (mine / name).write_text("{}")
            in_use = pytest.raises(CommandError, match=f"--name mine: in use by process {os.getpid()} on ")
            with in_use as error, files.held(mine):
                raise AssertionError("two hold it")
            assert error.value.status == 2
        assert mine.parent.exists() is bool(written)
