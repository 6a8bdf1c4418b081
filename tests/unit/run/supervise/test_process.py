"""The one file that starts processes: helper programs that run wild, and a launcher that must leave nothing behind."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launch import process
from launch.errors import ProcessError
from launch.process import LauncherProcess

LONG_S = 60  # of processes that are ended much sooner
WAIT_S = 30  # for an end that comes at once


def has_ended(pid):
    """Whether a process, which need not be our child, ends within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while (found := process.stat(pid)) is not None and found.state != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_program_that_prints_too_much_ends_with_what_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MAX_BYTES", 10)
    words = f"sleep {LONG_S} & echo $! > {tmp_path}/child; echo more than ten bytes; wait"
    with pytest.raises(ProcessError, match=r"^sh printed more than"):
        process.ask(["sh", "-c", words], timeout_s=WAIT_S)
    assert has_ended(int((tmp_path / "child").read_text()))


def test_a_daemon_of_a_program_neither_delays_the_answer_nor_lives_on(monkeypatch):
    monkeypatch.setattr(process, "LINGER_S", 0.05)
    words = f"setsid sleep {LONG_S} & echo $!"
    answer = process.ask(["sh", "-c", words], timeout_s=WAIT_S, ends_daemons=True)
    assert has_ended(int(answer.out))


@pytest.fixture
def start(tmp_path):
    """Start a launcher of some words."""
    running = []

    def one(*words):
        folder = tmp_path / "folder"
        folder.mkdir()
        env = {**os.environ, "HVDLAUNCH_REPORT": f"{folder}/report.json"}
        running.append(LauncherProcess(words, env=env, folder=folder))
        return running[-1]

    yield one
    for launcher in running:
        launcher.errors.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # from Python 3.12 on, of forks
def test_a_launcher_is_told_to_end_with_who_has_started_it_and_its_folder_goes(start, tmp_path):
    launchers = []
    starter = threading.Thread(target=lambda: launchers.append(start("sleep", str(LONG_S))))
    starter.start()
    starter.join()
    (launcher,) = launchers
    assert launcher.wait(WAIT_S) == 128 + signal.SIGTERM
    launcher.end()
    assert not (tmp_path / "folder").exists()


OF_A_RANK = "HVDLAUNCH_RANK={}"
OTHERS = ("", f"{OF_A_RANK} HVDLAUNCH_REPORT=/tmp/.hvdlaunch-other/report.json")  # the launcher's, another run's


@pytest.mark.parametrize("killed", [False, True])
def test_a_daemon_of_a_rank_ends_with_the_run_and_no_other_does(start, tmp_path, killed):
    daemons = (f"{given} setsid sleep {LONG_S} & echo $! >> {tmp_path}/pids;" for given in (OF_A_RANK, *OTHERS))
    launcher = start("sh", "-c", "".join(daemons))
    launcher.wait(WAIT_S)
    of_rank, *others = map(int, (tmp_path / "pids").read_text().split())
    while b"sleep" not in Path(f"/proc/{others[-1]}/cmdline").read_bytes():
        time.sleep(0.01)
    if killed:  # as by kill -9 of hvdlaunch: the keeper does it
        os.close(launcher._keeper[1])
        launcher._keeper = (launcher._keeper[0], os.open(os.devnull, os.O_RDONLY))
    else:
        launcher.end()
    assert has_ended(of_rank)
    assert [process.stat(pid) is None for pid in others] == [False, False]
    for pid in others:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # from Python 3.12 on, of forks
@pytest.mark.parametrize(("child", "is_alone"), [("", False), ("sleep 1;", True), (f"sleep {LONG_S};", False)])
def test_a_launcher_whose_children_have_all_ended_is_alone(start, monkeypatch, child, is_alone):
    monkeypatch.setattr(process, "ALONE_S", 0.2)
    launcher = start("sh", "-c", f"{child} exec sleep {LONG_S}")
    deadline = time.monotonic() + (WAIT_S if is_alone else 1)
    while not launcher.is_alone() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launcher.is_alone() is is_alone
    launcher.end()


def test_what_ignores_sigterm_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "TERMINATE_S", 0.5)
    deaf = ["sh", "-c", f"trap '' TERM; echo; sleep {LONG_S}"]
    with subprocess.Popen(deaf, stdout=subprocess.PIPE, start_new_session=True) as running:
        running.stdout.readline()
        process._end_run(running.pid, tmp_path)
        assert running.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_may_have_any_name():
    renamed = ["sh", "-c", "printf '\\345' > /proc/$$/comm; echo; read x"]
    with subprocess.Popen(renamed, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        running.stdout.readline()
        assert process.stat(running.pid).parent == os.getpid()


def test_a_launcher_that_is_not_there_is_named_and_leaves_no_folder(start, tmp_path):
    with pytest.raises(ProcessError, match=r"^/no/mpirun cannot be started: No such file or directory$"):
        start("/no/mpirun")
    assert not (tmp_path / "folder").exists()


def test_a_program_is_found_as_a_shell_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = tmp_path / "first" / "prog", tmp_path / "second" / "prog"
    for path in (first, second):
        path.parent.mkdir()
        path.touch(0o755)
    folders = f"/nowhere:first:{second.parent}"  # one is relative
    assert process.find("prog", folders) == str(first)
    first.chmod(0o644)
    assert process.find("prog", folders) == str(second)
    assert process.find("./second/prog", folders) == str(second)
    (first.parent / "env").symlink_to(second)
    assert process.find("env", folders) == str(first.parent / "env")  # a link into a virtual environment stays one
    assert process.find("prog", "/nowhere") is None


def test_a_signal_goes_to_mpirun_and_not_to_the_shell_around_it(monkeypatch):
    sent, launcher, shell, mpirun = [], object.__new__(LauncherProcess), 10, 11
    launcher.pid, launcher._receivers = shell, ("mpirun",)
    monkeypatch.setattr(process, "_oldest", lambda session, names: {(shell, ("mpirun",)): mpirun}[session, names])
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    launcher.signal(signal.SIGTERM)
    assert sent == [(mpirun, signal.SIGTERM)]
