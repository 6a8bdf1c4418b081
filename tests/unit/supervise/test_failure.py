import json
from pathlib import Path

import pytest

from launch.placement.slots import place
from launch.supervise import failure, rank_logs
from launch.supervise.failure import explain, first_failed, read_traces, summary_line
from launch.supervise.mpirun_output import MpirunOutput
from launch.supervise.rank_logs import Logs
from launch.supervise.report import read_report
from tests.unit.machines import hosts, machine
from tests.unit.supervise.test_mpirun_output import CLOSED, KILLED, KILLED_OF_5, NONZERO, STATUS_3, fed


@pytest.fixture
def slots():
    return place(hosts(h1=2, h2=1), {"h1": machine(), "h2": machine()}, np=3, gpus="all", binding="numa")


@pytest.fixture(autouse=True)
def hosts_answer(monkeypatch):
    monkeypatch.setattr(failure, "silent_host", lambda *_: None)


def output_of(stderr):
    return fed(stderr)[0]


def folder_with(folder, report=None, **errors):
    """A run folder, and the report that names it."""
    (folder / "ranks").mkdir()
    for name, words in errors.items():
        (folder / "ranks" / f"{name.replace('_', '-')}.err").write_bytes(words)
    path = folder / "report.json"
    path.write_text(json.dumps({"run_folder": str(folder)} if report is None else report))
    return path


def test_a_status_is_explained_by_rank_and_host(slots):
    nowhere = Path("/nonexistent/report.json")
    assert explain(3, output_of(STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"
    assert (
        explain(137, output_of(KILLED), slots, read_report(nowhere))
        == "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory"
    )
    assert explain(1, MpirunOutput({"h1", "h2"}), slots, read_report(nowhere)) == "the launcher exited with status 1"
    strange = STATUS_3.replace(b"],2]", b"],7]")
    assert explain(3, output_of(strange), slots, read_report(nowhere)) == "the launcher exited with status 3"


def test_a_lost_host_is_named_with_its_ranks(slots, monkeypatch):
    nowhere = Path("/nonexistent/report.json")
    assert explain(205, output_of(CLOSED), slots, read_report(nowhere)) == "host h2 no longer answers; it had rank 2"
    lost = CLOSED.replace(b"h2", b"h1")
    assert explain(205, output_of(lost), slots, read_report(nowhere)) == "host h1 no longer answers; it had ranks 0, 1"
    monkeypatch.setattr(failure, "silent_host", lambda *_: "h2")
    assert (
        explain(205, MpirunOutput({"h1", "h2"}), slots, read_report(nowhere))
        == "host h2 no longer answers; it had rank 2"
    )
    assert explain(3, output_of(STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"


def test_a_host_that_ssh_calls_by_another_name_is_found(slots, monkeypatch, tmp_path):
    nowhere = Path("/nonexistent/report.json")
    alias = CLOSED.replace(b"h2", b"203.0.113.5")
    assert explain(205, output_of(alias), slots, read_report(nowhere)) == "the launcher exited with status 205"
    assert explain(3, output_of(alias + STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"
    report = folder_with(tmp_path, rank_0=b"ValueError: its own ssh ended")
    assert explain(1, output_of(alias), slots, read_report(report)).startswith(
        "rank 0 on h1 ended the run with status 1; its last"
    )
    monkeypatch.setattr(failure, "silent_host", lambda *_: "h2")
    assert explain(205, output_of(alias), slots, read_report(nowhere)) == "host h2 no longer answers; it had rank 2"


def test_the_last_words_of_the_first_failing_rank_are_shown(slots, tmp_path):
    report = folder_with(
        tmp_path,
        rank_0=b"Traceback\nhorovod.common.exceptions.HorovodInternalError: shut down\n",
        rank_1=b"".join(b"line %d\n" % i for i in range(30)) + b"ValueError: \xff broken\n\n",
        rank_2=b"",
        rank_x=b"not ours",
    )
    line, *words = explain(1, output_of(STATUS_3), slots, read_report(report)).splitlines()
    assert line == "rank 1 on h1 ended the run with status 1; its last words:"
    assert words == [
        *[f"    line {i}" for i in range(19, 30)],
        "    ValueError: \ufffd broken",
        f"    {tmp_path}/ranks/rank-1.err",
    ]


def test_its_banner_and_its_error_file_make_one_line(slots, tmp_path):
    report = folder_with(tmp_path, rank_2=b"MPI_ERR_INTERN: internal error")
    assert explain(3, output_of(STATUS_3), slots, read_report(report)).startswith(
        "rank 2 on h2 ended with status 3; its last words:\n"
    )


def test_what_the_program_has_said_is_not_said_again(slots, tmp_path):
    report = folder_with(tmp_path, report={"run_folder": "x", "said": "hvdtrain: --lr 0 is wrong"})
    assert explain(2, output_of(STATUS_3), slots, read_report(report)) is None


@pytest.mark.parametrize(
    "secondary", [b"HorovodInternalError", b"Broken pipe", b"MPI_ERR_INTERN", b"Connection reset by peer"]
)
def test_errors_about_another_ranks_end_come_second(tmp_path, secondary):
    folder_with(tmp_path, rank_0=secondary, rank_10=b"OutOfMemoryError", rank_2=b"ValueError")
    story = MpirunOutput({"h1", "h2"})
    for first in (2, 10, 0):
        assert first_failed(story, read_traces(tmp_path / "ranks", 11)) == first
        (tmp_path / "ranks" / f"rank-{first}.err").unlink()
    assert first_failed(story, read_traces(tmp_path / "ranks", 11)) is None
    assert read_traces(tmp_path / "missing", 11) == {}


def at(folder, **places):
    """What each rank keeps of where it is, as hvdtrain writes it."""
    for name, words in places.items():
        (folder / "ranks" / f"{name.replace('_', '-')}.at").write_text(f"{words:<63}\n")


def line(status, stderr, slots, report):
    return summary_line(explain(status, output_of(stderr), slots, read_report(report)))


def test_a_kill_may_be_for_want_of_memory_and_says_where(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"HorovodInternalError: shut down")
    assert line(137, KILLED, slots, report) == "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory"
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 waiting", rank_2="step 7 working")
    assert (
        line(137, KILLED, slots, report) == "rank 2 on h2 died of signal 9 (Killed), perhaps out of memory, at step 7"
    )
    at(tmp_path, rank_2="step 7 saving")
    assert line(137, KILLED, slots, report).endswith("out of memory, at step 7 while saving")
    assert line(139, KILLED_OF_5, slots, report).startswith(
        "rank 0 on h1 died of signal 11 (Segmentation fault) at step 7"
    )
    at(tmp_path, rank_2="start working")
    assert line(3, STATUS_3, slots, report) == "rank 2 on h2 ended with status 3 at the start"


def test_a_rank_that_was_killed_comes_before_errors_that_may_follow_from_it(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"RuntimeError: a new word for a peer that is gone")
    assert line(137, KILLED, slots, report).startswith("rank 2 on h2 died of signal 9")
    for number in (6, 15):  # so end those whom MPI or mpirun ends
        stderr = KILLED.replace(b"signal 9", b"signal %d" % number)
        assert line(1, stderr, slots, report).startswith(
            "rank 0 on h1 ended the run with status 1: RuntimeError: a new"
        )


def test_the_rank_that_mpirun_names_comes_first_of_those_that_failed_by_themselves(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=b"ValueError: 0", rank_2=b"ValueError: 2")
    assert line(3, STATUS_3, slots, report) == "rank 2 on h2 ended with status 3: ValueError: 2"


def test_files_of_ranks_that_this_attempt_does_not_have_are_not_read(slots, tmp_path):
    report = folder_with(tmp_path, rank_3=b"ValueError: of an attempt with more ranks")
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
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 working", rank_2="step 7 waiting")
    explanation = explain(1, output_of(BY_RANK[1]), slots, read_report(report))
    assert explanation.splitlines() == [
        "rank 1 on h1 hung at step 7: no progress for 0:01:00; it stood here:",
        '      File "/my/data.py", line 88, in __getitem__',
        '      File "/my/main.py", line 5 in <module>',
        f"    {tmp_path}/ranks/rank-1.err",
    ]
    assert summary_line(explanation) == "rank 1 on h1 hung at step 7: no progress for 0:01:00"
    at(tmp_path, rank_1="step 7 reading")
    hung = "rank 1 on h1 hung at step 7 while reading: no progress for 0:01:00"
    assert line(1, BY_RANK[1], slots, report) == hung


@pytest.mark.parametrize(
    ("fired", "shown"),
    [
        ("0:01:00.500000", "0:01:00.5"),
        ("0:01:00.050000", "0:01:00.05"),
        ("1:10:10", "1:10:10"),
        ("0:00:00.100000", "0:00:00.1"),
    ],
)
def test_how_long_it_waited_is_told_without_noughts(slots, tmp_path, fired, shown):
    report = folder_with(tmp_path, rank_1=FIRED.replace(b"0:01:00", fired.encode()))
    assert line(1, BY_RANK[1], slots, report) == f"rank 1 on h1 hung: no progress for {shown}"


def test_a_rank_that_waits_in_vain_names_those_that_did_not_come(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED)
    at(tmp_path, rank_0="step 8 waiting", rank_1="step 8 waiting", rank_2="step 7 saving")
    why = "(it hangs, was stopped, or its host is silent)"
    assert line(1, BY_RANK[0], slots, report) == f"rank 2 on h2 did not arrive at step 8 {why}"
    at(tmp_path, rank_1="step 8 evaluating")
    assert line(1, BY_RANK[0], slots, report) == (
        "rank 1 on h1, rank 2 on h2 did not arrive at step 8 (they hang, were stopped, or their hosts are silent)"
    )
    at(tmp_path, rank_1="step 8 waiting", rank_2="step 8 reading")
    assert line(1, BY_RANK[0], slots, report) == (
        "rank 2 on h2 did not arrive at step 8 (while reading: it hangs, was stopped, or its host is silent)"
    )
    (tmp_path / "ranks" / "rank-2.at").unlink()
    assert line(1, BY_RANK[0], slots, report) == f"rank 2 on h2 did not arrive at step 8 {why}"


def test_where_one_fired_while_it_worked_those_that_waited_for_it_are_not_blamed(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED, rank_1=FIRED, rank_2=FIRED)
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 working", rank_2="step 7 waiting")
    hung = "rank 1 on h1 hung at step 7: no progress for 0:01:00"
    assert line(1, BY_RANK[1], slots, report) == line(1, NONZERO, slots, report) == hung
    # Its own watchdog would have been sooner: it was stopped, and fired when mpirun woke it to end it.
    assert line(1, BY_RANK[0], slots, report).startswith("rank 1 on h1 did not arrive at step 7 (it hangs, was stopped")
    (tmp_path / "ranks" / "rank-2.err").write_bytes(b"ValueError: the cause")
    assert (
        line(1, BY_RANK[0], slots, report)
        == "rank 2 on h2 ended the run with status 1 at step 7: ValueError: the cause"
    )


def test_ranks_that_all_wait_are_said_to(slots, tmp_path):
    report = folder_with(tmp_path, rank_0=FIRED)
    at(tmp_path, rank_0="step 7 waiting", rank_1="step 7 waiting", rank_2="step 7 waiting")
    assert line(1, BY_RANK[0], slots, report).startswith(
        "deadlock: all ranks are waiting in a collective, rank 0 on h1 at step 7: no progress for 0:01:00"
    )


def test_without_heartbeats_the_rank_that_fired_is_named(slots, tmp_path):
    report = folder_with(tmp_path, rank_1=FIRED)
    assert line(1, BY_RANK[1], slots, report) == "rank 1 on h1 hung: no progress for 0:01:00"
    at(tmp_path, rank_1="stop making sense")
    assert line(1, BY_RANK[1], slots, report) == "rank 1 on h1 hung: no progress for 0:01:00"


def test_a_crash_shows_the_stack_of_the_thread_that_crashed(slots, tmp_path):
    crash = FIRED.replace(b"Timeout (0:01:00)!", b"Fatal Python error: Segmentation fault\n").replace(
        b"Thread 0x00007f", b"Current thread 0x00007f"
    )
    report = folder_with(tmp_path, rank_0=crash)
    explanation = explain(139, output_of(KILLED_OF_5), slots, read_report(report)).splitlines()
    assert explanation[0] == "rank 0 on h1 died of signal 11 (Segmentation fault); it stood here:"
    assert explanation[1:-1] == ['      File "/lib/threading.py", line 1, in wait']


def test_nothing_said_is_no_line():
    assert summary_line("") == ""


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """The logs of a run by rank, as if all hosts were this one."""
    monkeypatch.setattr(rank_logs, "is_local", lambda _: True)
    folder = tmp_path / "logs"
    folder.mkdir()

    def write(**by_rank):
        for name, text in by_rank.items():
            (folder / f"{name.replace('_', '-')}.log").write_bytes(text)
        return Logs(folder=folder, python="python")

    return write


TRACEBACK = b"epoch 1\nTraceback (most recent call last):\n\tFile x\nValueError: \x1b[2Jfirst\n"


def test_of_any_program_the_end_of_its_log_is_shown(slots, logs):
    nowhere = Path("/nonexistent/report.json")
    told = logs(rank_0=b"not it", rank_2=TRACEBACK)
    explanation = explain(3, output_of(STATUS_3), slots, read_report(nowhere), logs=told)
    assert explanation.splitlines() == [
        "rank 2 on h2 ended with status 3; its last words:",
        "    epoch 1",
        "    Traceback (most recent call last):",
        "            File x",
        r"    ValueError: \x1b[2Jfirst",
        f"    {told.file(2)}",
    ]
    assert summary_line(explanation) == r"rank 2 on h2 ended with status 3: ValueError: \x1b[2Jfirst"
    killed = explain(137, output_of(KILLED), slots, read_report(nowhere), logs=told)
    assert killed.startswith("rank 2 on h2 died of signal 9 (Killed), perhaps out of memory; its last words:\n")
    silent = explain(3, output_of(BY_RANK[1]), slots, read_report(nowhere), logs=told)
    assert silent == "rank 1 on h1 ended with status 3"


def test_a_rank_that_has_left_last_words_of_its_own_is_not_quoted_from_its_log(slots, tmp_path, logs):
    report = folder_with(tmp_path, rank_2=b"ValueError: its own")
    told = logs(rank_2=TRACEBACK)
    assert "its own" in summary_line(explain(3, output_of(STATUS_3), slots, read_report(report), logs=told))
    (tmp_path / "ranks" / "rank-2.err").write_bytes(b"")
    at(tmp_path, rank_2="step 7 working")
    explanation = explain(3, output_of(STATUS_3), slots, read_report(report), logs=told)
    assert explanation.startswith("rank 2 on h2 ended with status 3 at step 7; its last words:\n    epoch 1\n")


def test_a_line_without_end_is_shown_in_part(slots, logs):
    told = logs(rank_2=b"x" * 100_000)
    _, end, _ = explain(3, output_of(STATUS_3), slots, read_report(Path("/nonexistent")), logs=told).splitlines()
    assert end == "    " + "x" * 500


def test_where_a_program_has_crashed_in_python_it_is_shown_where_it_stood(slots, logs):
    crash = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    crash += b'  File "a.py"\n\nmore'
    told = logs(rank_0=crash)
    explanation = explain(139, output_of(KILLED_OF_5), slots, read_report(Path("/nonexistent")), logs=told)
    assert explanation.splitlines()[:2] == [
        "rank 0 on h1 died of signal 11 (Segmentation fault); it stood here:",
        '      File "a.py"',
    ]
