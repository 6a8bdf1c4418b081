import json

import pytest

from launch.placement.slots import place
from launch.supervise import failure, rank_logs
from launch.supervise.failure import explain, first_failed, read_traces, summary_line
from launch.supervise.mpirun_output import MpirunOutput
from launch.supervise.rank_logs import Logs
from launch.supervise.report import Report, read_report
from tests.unit.machines import hosts, machine
from tests.unit.supervise.test_mpirun_output import CLOSED, KILLED, KILLED_OF_5, NONZERO, STATUS_3, fed


@pytest.fixture
def slots():
    return place(hosts(h1=2, h2=1), {"h1": machine(), "h2": machine()}, np=3, gpus="all", binding="numa")


@pytest.fixture(autouse=True)
def hosts_answer(monkeypatch):
    monkeypatch.setattr(failure, "silent_host", lambda *_: None)


def explained(status, stderr, slots, report=None, **logs):
    return explain(status, fed(stderr)[0], slots, report or Report(), **logs)


def line(status, stderr, slots, report=None):
    return summary_line(explained(status, stderr, slots, report))


def folder_with(folder, **errors):
    """The report of a run folder in which ranks have left errors."""
    (folder / "ranks").mkdir()
    for name, words in errors.items():
        (folder / "ranks" / f"{name.replace('_', '-')}.err").write_bytes(words)
    return Report(run_folder=str(folder))


def at(folder, **places):
    """What each rank keeps of where it is, as hvdtrain writes it."""
    for name, words in places.items():
        (folder / "ranks" / f"{name.replace('_', '-')}.at").write_text(f"{words:<63}\n")


def test_a_status_is_explained_by_rank_and_host(slots):
    assert line(3, STATUS_3, slots) == "rank 2 on h2 ended with status 3"
    assert line(137, KILLED, slots) == "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory"
    assert line(1, b"", slots) == "the launcher exited with status 1"
    assert line(3, STATUS_3.replace(b"],2]", b"],7]"), slots) == "the launcher exited with status 3"


def test_a_lost_host_is_named_with_its_ranks_also_where_ssh_calls_it_otherwise(slots, monkeypatch, tmp_path):
    assert line(205, CLOSED, slots) == "host h2 no longer answers; it had rank 2"
    assert line(205, CLOSED.replace(b"h2", b"h1"), slots) == "host h1 no longer answers; it had ranks 0, 1"
    alias = CLOSED.replace(b"h2", b"203.0.113.5")
    assert line(205, alias, slots) == "the launcher exited with status 205"
    assert line(3, alias + STATUS_3, slots) == "rank 2 on h2 ended with status 3"
    report = folder_with(tmp_path, rank_0=b"ValueError: its own ssh ended")
    assert line(1, alias, slots, report).startswith("rank 0 on h1 ended the run with status 1: ValueError")
    monkeypatch.setattr(failure, "silent_host", lambda *_: "h2")
    for stderr in (alias, b""):
        assert line(205, stderr, slots) == "host h2 no longer answers; it had rank 2"
    assert line(3, STATUS_3, slots) == "rank 2 on h2 ended with status 3"


def test_the_last_words_of_the_first_failing_rank_are_shown(slots, tmp_path):
    report = folder_with(
        tmp_path,
        rank_0=b"Traceback\nhorovod.common.exceptions.HorovodInternalError: shut down\n",
        rank_1=b"".join(b"line %d\n" % i for i in range(30)) + b"ValueError: \xff broken\n\n",
        rank_2=b"",
    )
    assert explained(1, STATUS_3, slots, report).splitlines() == [
        "rank 1 on h1 ended the run with status 1; its last words:",
        *[f"    line {i}" for i in range(19, 30)],
        "    ValueError: \ufffd broken",
        f"    {tmp_path}/ranks/rank-1.err",
    ]


def test_what_the_program_has_said_is_not_said_again(slots, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"run_folder": "x", "said": "hvdtrain: --lr 0 is wrong"}))
    assert explained(2, STATUS_3, slots, read_report(tmp_path / "report.json")) is None


@pytest.mark.parametrize(
    "secondary", [b"HorovodInternalError", b"Broken pipe", b"MPI_ERR_INTERN", b"Connection reset by peer"]
)
def test_errors_about_another_ranks_end_come_second(tmp_path, secondary):
    folder_with(tmp_path, rank_0=secondary, rank_10=b"OutOfMemoryError", rank_2=b"ValueError")
    output = MpirunOutput({"h1", "h2"})
    for first in (2, 10, 0):
        assert first_failed(output, read_traces(tmp_path / "ranks", 11)) == first
        (tmp_path / "ranks" / f"rank-{first}.err").unlink()
    assert first_failed(output, read_traces(tmp_path / "ranks", 11)) is None


def test_a_kill_may_be_for_want_of_memory_and_says_where(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"HorovodInternalError: shut down")
    killed = "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory"
    assert line(137, KILLED, slots, report) == killed
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 waiting", rank_2="step 7 working")
    assert line(137, KILLED, slots, report) == f"{killed}, at step 7"
    at(tmp_path, rank_2="step 7 saving")
    assert line(137, KILLED, slots, report) == f"{killed}, at step 7 while saving"
    at(tmp_path, rank_2="start working")
    assert line(3, STATUS_3, slots, report) == "rank 2 on h2 ended with status 3 at the start"


def test_a_rank_that_was_killed_comes_before_errors_that_may_follow_from_it(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"RuntimeError: a new word for a peer that is gone")
    assert line(137, KILLED, slots, report).startswith("rank 2 on h2 died of signal 9")
    for number in (6, 15):  # so end those whom MPI or mpirun ends
        stderr = KILLED.replace(b"signal 9", b"signal %d" % number)
        assert line(1, stderr, slots, report).startswith("rank 0 on h1 ended the run with status 1: RuntimeError")


def test_of_ranks_that_failed_by_themselves_mpiruns_comes_first_and_none_of_an_attempt_with_more_ranks(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"ValueError: 0", rank_2=b"ValueError: 2", rank_3=b"ValueError: 3")
    assert line(3, STATUS_3, slots, report) == "rank 2 on h2 ended with status 3: ValueError: 2"
    for rank in (0, 2):
        (tmp_path / "ranks" / f"rank-{rank}.err").unlink()
    assert line(3, STATUS_3, slots, report) == "rank 2 on h2 ended with status 3"


FIRED = b"""Timeout (0:01:00)!
Thread 0x00007f (most recent call first):
  File "/lib/threading.py", line 1, in wait

Thread 0x00007e (most recent call first):
  File "/my/data.py", line 88, in __getitem__
  File "/my/main.py", line 5 in <module>
"""
BY_RANK = {rank: STATUS_3.replace(b"],2]", b"],%d]" % rank) for rank in range(3)}


def test_a_rank_whose_own_work_hangs_is_named_with_its_stack(slots, tmp_path):
    report = folder_with(tmp_path, rank_1=FIRED)
    without_place = "rank 1 on h1 hung: no progress for 0:01:00"
    assert line(1, BY_RANK[1], slots, report) == without_place
    at(tmp_path, rank_1="stop making sense")
    assert line(1, BY_RANK[1], slots, report) == without_place
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 working", rank_2="step 7 waiting")
    explanation = explained(1, BY_RANK[1], slots, report)
    assert explanation.splitlines() == [
        "rank 1 on h1 hung at step 7: no progress for 0:01:00; it stood here:",
        '      File "/my/data.py", line 88, in __getitem__',
        '      File "/my/main.py", line 5 in <module>',
        f"    {tmp_path}/ranks/rank-1.err",
    ]
    assert summary_line(explanation) == "rank 1 on h1 hung at step 7: no progress for 0:01:00"
    (tmp_path / "ranks" / "rank-1.err").write_bytes(FIRED.replace(b"0:01:00", b"0:01:00.050000"))
    at(tmp_path, rank_1="step 7 reading")
    assert line(1, BY_RANK[1], slots, report) == (
        "rank 1 on h1 hung at step 7 while reading: no progress for 0:01:00.05"
    )


def test_a_rank_that_waits_in_vain_names_those_that_did_not_come(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED)
    at(tmp_path, rank_0="step 8 waiting", rank_1="step 8 waiting", rank_2="step 7 saving")
    late = "rank 2 on h2 did not arrive at step 8 (it hangs, was stopped, or its host is silent)"
    assert line(1, BY_RANK[0], slots, report) == late
    at(tmp_path, rank_1="step 8 evaluating")
    assert line(1, BY_RANK[0], slots, report) == (
        "rank 1 on h1, rank 2 on h2 did not arrive at step 8 (they hang, were stopped, or their hosts are silent)"
    )
    at(tmp_path, rank_1="step 8 waiting", rank_2="step 8 reading")
    assert line(1, BY_RANK[0], slots, report) == late.replace("(", "(while reading: ")
    (tmp_path / "ranks" / "rank-2.at").unlink()
    assert line(1, BY_RANK[0], slots, report) == late


def test_where_one_fired_while_it_worked_those_that_waited_for_it_are_not_blamed(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED, rank_1=FIRED, rank_2=FIRED)
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 working", rank_2="step 7 waiting")
    hung = "rank 1 on h1 hung at step 7: no progress for 0:01:00"
    assert line(1, BY_RANK[1], slots, report) == line(1, NONZERO, slots, report) == hung
    # Its own watchdog would have been sooner: it was stopped, and fired when mpirun woke it to end it.
    assert line(1, BY_RANK[0], slots, report).startswith("rank 1 on h1 did not arrive at step 7 (it hangs, was stopped")
    (tmp_path / "ranks" / "rank-2.err").write_bytes(b"ValueError: the cause")
    assert line(1, BY_RANK[0], slots, report) == (
        "rank 2 on h2 ended the run with status 1 at step 7: ValueError: the cause"
    )


def test_ranks_that_all_wait_are_said_to(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED)
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 waiting", rank_2="step 7 waiting")
    assert line(1, BY_RANK[0], slots, report).startswith(
        "deadlock: all ranks are waiting in a collective, rank 0 on h1 at step 7: no progress for 0:01:00"
    )


def test_a_crash_shows_the_stack_of_the_thread_that_crashed(slots, tmp_path):
    crash = FIRED.replace(b"Timeout (0:01:00)!", b"Fatal Python error: Segmentation fault\n")
    report = folder_with(tmp_path, rank_0=crash.replace(b"Thread 0x00007f", b"Current thread 0x00007f"))
    assert explained(139, KILLED_OF_5, slots, report).splitlines()[:-1] == [
        "rank 0 on h1 died of signal 11 (Segmentation fault); it stood here:",
        '      File "/lib/threading.py", line 1, in wait',
    ]


def test_without_words_of_its_own_the_end_of_a_ranks_log_is_shown(slots, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_logs, "is_local", lambda _: True)
    logs = Logs(folder=tmp_path, python="python")
    text = b"epoch 1\nTraceback (most recent call last):\n\tFile x\nValueError: \x1b[2Jfirst\n"
    logs.file(2).write_bytes(text)
    explanation = explained(3, STATUS_3, slots, logs=logs)
    assert explanation.splitlines() == [
        "rank 2 on h2 ended with status 3; its last words:",
        "    epoch 1",
        "    Traceback (most recent call last):",
        "            File x",
        r"    ValueError: \x1b[2Jfirst",
        f"    {logs.file(2)}",
    ]
    assert summary_line(explanation) == r"rank 2 on h2 ended with status 3: ValueError: \x1b[2Jfirst"
    assert explained(3, BY_RANK[1], slots, logs=logs) == "rank 1 on h1 ended with status 3"
    report = folder_with(tmp_path, rank_2=b"ValueError: its own")
    assert "its own" in summary_line(explained(3, STATUS_3, slots, report, logs=logs))
    (tmp_path / "ranks" / "rank-2.err").write_bytes(b"")
    at(tmp_path, rank_2="step 7 working")
    assert explained(3, STATUS_3, slots, report, logs=logs).startswith(
        "rank 2 on h2 ended with status 3 at step 7; its last words:\n    epoch 1\n"
    )
    logs.file(2).write_bytes(b"x" * 100_000)
    assert explained(3, STATUS_3, slots, logs=logs).splitlines()[1] == "    " + "x" * 500
