import re

import pytest

from launch.machine.mpi import Parameter
from launch.placement.slots import place
from launch.run.start.launchers.openmpi import MESSAGES
from launch.run.supervise import failure
from launch.run.supervise.failure import explain, first_failed, summary_line
from launch.run.supervise.launcher_output import LauncherOutput
from launch.run.supervise.rank_logs import Logs, RankReport
from launch.run.supervise.traces.files import read_traces
from tests.unit.machines import hosts, machine
from tests.unit.run.supervise.test_launcher_output import CLOSED, KILLED, KILLED_OF_5, NONZERO, STATUS_3, fed

SLOTS = place(hosts(h1=2, h2=1), {"h1": machine(), "h2": machine()}, np=3, gpus="all", binding="numa")
FIRED = b"""Timeout (0:01:00)!
Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 1, in wait

Thread 0x00007e (most recent call first):
  File "/my/data.py", line 88, in __getitem__
  File "/my/main.py", line 5 in <module>
"""
CRASH = FIRED.replace(b"Timeout (0:01:00)!", b"Fatal Python error: Segmentation fault\n")
CRASH = CRASH.replace(b"Thread 0x00007f", b"Current thread 0x00007f")
BY_RANK = {rank: STATUS_3.replace(b"],2]", b"],%d]" % rank) for rank in range(3)}
ALIAS = CLOSED.replace(b"h2", b"203.0.113.5")
AT_7 = {0: "step 7 waiting", 1: "step 7 working", 2: "step 7 waiting"}
KILL = "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory"
HUNG = "rank 1 on h1 hung at step 7: no progress for 0:01:00"
LATE = "rank 2 on h2 did not arrive at step 8 (it hangs, was stopped, or its host is silent)"
BOTH_LATE = "rank 1 on h1, rank 2 on h2 did not arrive at step 8 (they hang, were stopped, or their hosts are silent)"
DEADLOCK = (
    "deadlock: all ranks are waiting in a collective, rank 0 on h1 at step 7: no progress for 0:01:00; "
    "they may be in different collectives, or one was stopped"
)
SHUT_DOWN = b"HorovodInternalError: shut down"


@pytest.fixture(autouse=True)
def hosts_answer(monkeypatch):
    monkeypatch.setattr(failure, "silent_host", lambda *_: None)


def run_folder(folder, errors, places):
    """The report of a run folder in which ranks have left errors, and where each was, as hvdtrain writes it."""
    (folder / "ranks").mkdir(exist_ok=True)
    for rank, words in errors.items():
        (folder / f"ranks/rank-{rank}.err").write_bytes(words)
    for rank, words in places.items():
        (folder / f"ranks/rank-{rank}.at").write_text(f"{words:<63}\n")
    return RankReport(run_folder=str(folder))


def explained(status, stderr, report=None, **logs):
    line, host = explain(status, fed(stderr)[0], SLOTS, report or RankReport(), **logs)
    first, _, others = (line or "").partition(" did not arrive")
    named = set(re.findall(r"\bh[12]\b", first if others else first.partition("; ")[0]))
    assert host == (named.pop() if len(named) == 1 and not first.startswith(("the launcher", "deadlock")) else None)
    return line


def test_a_launcher_without_a_word_of_its_only_rank_is_explained_by_what_that_has_written(tmp_path):
    [slot] = place(hosts(localhost=1), {"localhost": machine()}, np=1, gpus="all", binding="numa")
    facts = {"logs": Logs(folder=tmp_path, python="python"), "report": RankReport()}
    assert explain(1, fed(b"")[0], [slot], **facts) == ("the launcher exited with status 1", None)
    (tmp_path / "rank-0.log").write_text("it crashed\n")
    line, host = explain(1, fed(b"")[0], [slot], **facts)
    assert (summary_line(line), host) == ("rank 0 on localhost ended the run with status 1: it crashed", "localhost")


CUDA_ERROR = "rank 2 on h2 ended with status 3: torch.AcceleratorError: CUDA"


def test_a_launcher_that_fails_names_the_lines_of_open_mpis_files():
    def parameter(value, in_file):
        return Parameter(name="rmaps", value=value, where="/a.conf:2", of_prrte=False, in_file=in_file)

    line = explained(1, b"", parameters=(parameter("seq", True), parameter("ssh : rsh", True), parameter("x", False)))
    assert line == "the launcher exited with status 1. It obeys /a.conf:2: rmaps = seq"


@pytest.mark.parametrize(
    ("status", "stderr", "errors", "places", "line"),
    [
        (3, STATUS_3, {}, {}, "rank 2 on h2 ended with status 3"),
        (3, STATUS_3.replace(b"],2]", b"],7]"), {}, {}, "the launcher exited with status 3"),
        (137, KILLED, {}, {}, KILL),
        (137, KILLED, {2: b"epoch 1/2  train loss 2.1"}, {}, KILL),
        (137, KILLED, {0: SHUT_DOWN}, AT_7 | {2: "step 7 working"}, f"{KILL}, at step 7"),
        (137, KILLED, {0: SHUT_DOWN}, AT_7 | {2: "step 7 saving"}, f"{KILL}, at step 7 while saving"),
        (3, STATUS_3, {}, {2: "start working"}, "rank 2 on h2 ended with status 3 at the start"),
        # A host is lost, which ssh may know by another name.
        (205, CLOSED, {}, {}, "host h2 no longer answers; it had rank 2"),
        (205, CLOSED.replace(b"h2", b"h1"), {}, {}, "host h1 no longer answers; it had ranks 0, 1"),
        (205, ALIAS, {}, {}, "the launcher exited with status 205"),
        (3, ALIAS + STATUS_3, {}, {}, "rank 2 on h2 ended with status 3"),
        (1, ALIAS, {0: b"ValueError: ssh"}, {}, "rank 0 on h1 ended the run with status 1: ValueError: ssh"),
        # Who failed by itself comes first, and of several the one that mpirun names.
        (137, KILLED, {0: b"RuntimeError: a new word for a peer that is gone"}, {}, KILL),
        (1, KILLED.replace(b"signal 9", b"signal 6"), {0: b"Oh"}, {}, "rank 0 on h1 ended the run with status 1: Oh"),
        (3, STATUS_3, {0: b"0", 2: b"2"}, {}, "rank 2 on h2 ended with status 3: 2"),
        (3, STATUS_3, {2: b"torch.AcceleratorError: CUDA\nCompile with TORCH_USE_CUDA_DSA"}, {}, CUDA_ERROR),
        (3, STATUS_3, {3: b"of an attempt with more ranks"}, {}, "rank 2 on h2 ended with status 3"),
        # A rank hung, or waited for one that did.
        (1, BY_RANK[1], {1: FIRED}, AT_7, HUNG),
        (1, BY_RANK[1], {1: FIRED}, {1: "stop making sense"}, HUNG.replace(" at step 7", "")),
        (1, BY_RANK[1], {1: FIRED.replace(b":00)", b":00.050000)")}, AT_7, f"{HUNG}.05"),
        (1, NONZERO, dict.fromkeys(range(3), FIRED), AT_7, HUNG),
        (1, BY_RANK[1], {0: FIRED, 1: FIRED, 2: b"Oh"}, AT_7, "rank 2 on h2 ended the run with status 1 at step 7: Oh"),
        (1, BY_RANK[0], {0: FIRED}, {0: "step 8 waiting", 1: "step 8 waiting", 2: "step 7 saving"}, LATE),
        (1, BY_RANK[0], {0: FIRED}, {0: "step 8 waiting", 1: "step 8 waiting"}, LATE),
        (1, BY_RANK[0], {0: FIRED}, {0: "step 8 waiting", 2: "step 8 reading"}, LATE.replace("(", "(while reading: ")),
        (1, BY_RANK[0], {0: FIRED}, {0: "step 8 waiting", 1: "step 8 evaluating", 2: "step 7 saving"}, BOTH_LATE),
        (1, BY_RANK[0], {0: FIRED}, dict.fromkeys(range(3), "step 7 waiting"), DEADLOCK),
        # Its own watchdog would have been sooner: it was stopped, and fired when mpirun woke it to end it.
        (1, BY_RANK[0], {0: FIRED, 1: FIRED}, AT_7, LATE.replace("rank 2 on h2", "rank 1 on h1").replace("8", "7")),
    ],
)
def test_one_line_says_which_rank_failed_first_and_where(tmp_path, *, status, stderr, errors, places, line):
    assert summary_line(explained(status, stderr, run_folder(tmp_path, errors, places))) == line


@pytest.mark.parametrize("stderr", [ALIAS, b""])
def test_a_host_that_is_silent_is_named_though_mpirun_names_none(stderr, monkeypatch):
    monkeypatch.setattr(failure, "silent_host", lambda *_: "h2")
    assert explained(205, stderr) == "host h2 no longer answers; it had rank 2"
    assert explained(3, STATUS_3) == "rank 2 on h2 ended with status 3"


def test_what_the_program_has_said_is_not_said_again():
    assert explained(2, STATUS_3, RankReport(run_folder="x", explanation="hvdtrain: --lr 0 is wrong")) is None


@pytest.mark.parametrize(
    "secondary", [b"HorovodInternalError", b"Broken pipe", b"MPI_ERR_INTERN", b"Connection reset by peer"]
)
def test_errors_about_another_ranks_end_come_second(tmp_path, secondary):
    run_folder(tmp_path, {0: secondary, 10: b"OutOfMemoryError", 2: b"ValueError"}, {})
    output = LauncherOutput(MESSAGES, {"h1", "h2"})
    for first in (2, 10, 0):
        assert first_failed(output, read_traces(tmp_path / "ranks", range(11))) == first
        (tmp_path / f"ranks/rank-{first}.err").unlink()
    assert first_failed(output, read_traces(tmp_path / "ranks", range(11))) is None


def test_the_last_words_of_the_first_failing_rank_are_shown(tmp_path):
    words = b"".join(b"line %d\n" % i for i in range(30)) + b"ValueError: \xff broken\n\n"
    assert explained(1, STATUS_3, run_folder(tmp_path, {0: SHUT_DOWN, 1: words, 2: b""}, {})).splitlines() == [
        "rank 1 on h1 ended the run with status 1; its last words:",
        *[f"    line {i}" for i in range(19, 30)],
        "    ValueError: \ufffd broken",
        f"    {tmp_path}/ranks/rank-1.err",
    ]


def test_a_rank_that_hangs_shows_the_stack_of_its_main_thread_and_a_crash_that_of_its_own(tmp_path):
    assert explained(1, BY_RANK[1], run_folder(tmp_path, {1: FIRED}, AT_7)).splitlines() == [
        f"{HUNG}; it stood here:",
        '      File "/my/data.py", line 88, in __getitem__',
        '      File "/my/main.py", line 5 in <module>',
        f"    {tmp_path}/ranks/rank-1.err",
    ]
    assert explained(139, KILLED_OF_5, run_folder(tmp_path, {0: CRASH}, {})).splitlines()[:-1] == [
        "rank 0 on h1 died of signal 11 (Segmentation fault) at step 7; it stood here:",
        '      File "/lib/threading.py", line 1, in wait',
    ]
