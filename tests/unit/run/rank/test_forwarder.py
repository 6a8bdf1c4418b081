import contextlib
import errno
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run.rank import forwarder
from launch.run.rank.forwarder import CHUNK_BYTES, HELD_S, Line, RankLog, RankOutput, Streams, marked, new_log

OUT, ERR = 101, 102
SEEN_OUT, SEEN_ERR, LOG = 201, 202, 301
STREAMS = Streams(out=OUT, err=ERR, launchers_out=SEEN_OUT, launchers_err=SEEN_ERR)


class Files:
    """What was written, by file, in one list; a write may fail, or take so many bytes alone."""

    def __init__(self):
        self.written = []
        self.room = {LOG: math.inf, SEEN_OUT: math.inf, SEEN_ERR: math.inf}

    def write(self, file, text):
        taken = text[: int(min(self.room[file], len(text)))]
        if text and not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room[file] -= len(taken)
        self.written.append((file, taken))
        return len(taken)

    def of(self, file):
        return b"".join(text for into, text in self.written if into == file)


@pytest.fixture
def files(monkeypatch):
    made = Files()
    monkeypatch.setattr(os, "write", made.write)
    monkeypatch.setattr(forwarder.fcntl, "fcntl", lambda *_: 0)
    return made


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(forwarder.time, "monotonic", lambda: now[0])
    return now


def words(rank=0, *, show_all=False):
    return RankOutput(STREAMS, RankLog(LOG), rank, show_all=show_all)


def test_rank_0_is_seen_as_it_comes_on_its_own_streams(files, clock):
    said = words()
    for stream, chunk in ((OUT, b"a ba"), (ERR, b"\r 10%"), (OUT, b"r\n"), (ERR, b"\r 20%\x00\xff\x1b[2J")):
        said.feed(stream, chunk)
    assert files.of(SEEN_OUT) == b"a bar\n"
    assert files.of(SEEN_ERR) == b"\r 10%\r 20%\x00\xff\x1b[2J"
    assert files.of(LOG) == b"a bar\n"  # the rest of the other line may come
    said.flush(math.inf)
    assert files.of(LOG) == b"a bar\n\r 10%\r 20%\x00\xff\x1b[2J"


def test_another_rank_is_not_seen(files, clock):
    said = words(3)
    said.feed(OUT, b"a\n")
    said.feed(ERR, b"b\n")
    assert files.written == [(LOG, b"a\n"), (LOG, b"b\n")]


def test_a_line_that_is_not_whole_is_kept_back_for_a_while_and_mixes_with_none(files, clock):
    said = words(1)
    assert said.due == math.inf
    said.feed(OUT, b"Password: ")
    said.flush(clock[0])
    assert (files.written, said.due) == ([], HELD_S)
    clock[0] = HELD_S / 2
    said.feed(OUT, b"(none)")
    said.flush(clock[0])
    assert (files.written, said.due) == ([], HELD_S)
    said.flush(HELD_S)
    assert (files.of(LOG), said.due) == (b"Password: (none)", math.inf)
    said.feed(ERR, b"error\n")
    said.feed(OUT, b" yes\n")
    assert files.of(LOG) == b"Password: (none)\nerror\n yes\n"


def test_a_line_without_end_is_not_kept_back_for_ever():
    line, passed = Line(), 0
    for _ in range(100):
        passed += len(line.complete_lines(b"x" * 5000, 0.0))
    assert passed + len(line.rest()) == 500_000
    assert line.due == math.inf
    assert len(Line().complete_lines(b"x" * CHUNK_BYTES, 0.0)) == CHUNK_BYTES


def test_what_a_full_disk_does_not_take_is_dropped_and_counted(files, clock):
    files.room[LOG] = 6
    said = words(1)
    for number in range(3):
        said.feed(OUT, b"line %d\n" % number)
    assert files.of(LOG) == b"line 0"
    files.room[LOG] = math.inf
    said.feed(ERR, b"room again\n")
    assert files.of(LOG) == b"line 0\n[hvdlaunch: 15 bytes could not be written here]\nroom again\n"
    said.feed(ERR, b"more\n")
    assert files.of(LOG).endswith(b"here]\nroom again\nmore\n")


def test_nobody_who_watches_any_more_costs_the_log_nothing(files, clock):
    files.room[SEEN_OUT] = files.room[SEEN_ERR] = 0
    for rank, show_all in ((0, False), (1, True)):
        files.written.clear()
        said = words(rank, show_all=show_all)
        said.feed(OUT, b"line\n")
        assert files.written == [(LOG, b"line\n")]


def test_lines_are_marked():
    assert [*marked(b"a\n\nb", b"[12] ")] == [b"[12] a\n", b"[12] \n", b"[12] b\n"]
    assert [*marked(b"\r 10%\r 20%", b"[1] ")] == [b"[1]  20%\n"]
    assert [*marked(b"dos\r\n\n", b"[1] ")] == [b"[1] dos\n", b"[1] \n"]
    assert [*marked(b"\x1b[31mred\x1b[0m\n", b"[1] ")] == [b"[1] \x1b[31mred\x1b[0m\n"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(job, rank, text=b""):
    file = new_log(job, rank)
    os.write(file, text)
    os.close(file)


def test_a_log_is_its_owners_alone_and_the_one_before_stays(here):
    for text in (b"first", b"second", b"third"):
        kept("mine", 3, text)
    folder = here / "logs" / "mine"
    texts = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert texts == {"rank-3.log": b"third", "rank-3.before.log": b"second"}
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (here / "logs", folder, *folder.iterdir())}
    assert set(modes.values()) == {0o700, 0o600}


def test_words_of_an_attempt_before_stay_whatever_is_refused_after_it(here):
    kept("mine", 3, b"first")
    Path("logs/mine/torch-calls-3").touch()
    for _ in range(2):
        os.close(forwarder.rotate_log("mine", 3))
        folder = here / "logs" / "mine"
        assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("rank-3.before.log", b"first")]


@pytest.mark.parametrize("planted", ["logs", "logs/mine", "logs/mine/rank-0.log", "logs/mine/rank-0.before.log"])
def test_no_planted_link_is_followed(here, planted):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("keep me")
    (here / planted).parent.mkdir(parents=True, exist_ok=True)
    (here / planted).symlink_to(elsewhere / "file" if planted.endswith(".log") else elsewhere)
    with contextlib.suppress(OSError):
        kept("mine", 0, b"words")
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("file", "keep me")]
    if planted.endswith(".log"):
        assert (here / "logs/mine/rank-0.log").read_bytes() == b"words"
        assert not (here / "logs/mine/rank-0.log").is_symlink()


def test_a_stream_is_a_pipe_or_a_terminal_that_changes_no_byte(here):
    for size in (None, (24, 100)):
        reader, writer = forwarder._new_stream(size)
        assert os.isatty(writer) is (size is not None)
        if size:
            assert os.get_terminal_size(writer) == (100, 24)
        os.write(writer, b"a\nb")
        assert os.read(reader, 10) == b"a\nb"
        for file in (reader, writer):
            os.close(file)


@pytest.mark.parametrize("fails", ["_detach", "fork"])
def test_a_rank_without_a_forwarder_keeps_its_streams(here, monkeypatch, fails):
    real, forks = os.fork, []

    def fail(**_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def fork_once():
        forks.append(1)
        return real() if len(forks) == 1 else fail()

    monkeypatch.setattr(*((os, "fork", fork_once) if fails == "fork" else (forwarder, "_detach", fail)))
    before = [os.fstat(stream).st_ino for stream in (1, 2)]
    with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
        forwarder.start(new_log("mine", 0), 0, show_all=False, terminals=(None, None))
    assert [os.fstat(stream).st_ino for stream in (1, 2)] == before


RANK = """
import os, signal, sys, time
from pathlib import Path
from launch.run.rank import forwarder

def holders():
    mine = os.path.abspath("logs/mine/rank-0.log")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(file) == mine for file in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:
            pass

log = forwarder.new_log("mine", 0)
forwarder.start(log, 0, show_all=False, terminals=(None, None))
os.close(log)
for number in range(3):
    print("line", number, flush=True)
    while f"line {number}\\n" not in Path("logs/mine/rank-0.log").read_text():
        time.sleep(0.01)
    for pid in holders():
        os.kill(pid, signal.SIGKILL)
print("the end", flush=True)
"""


def test_a_forwarder_that_dies_is_replaced(here):
    """Each line is written to a new forwarder; without one the print would raise."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    lines = "line 0\nline 1\nline 2\nthe end\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, lines, "")
    assert (here / "logs/mine/rank-0.log").read_text() == lines
