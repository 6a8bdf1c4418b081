import json
from types import SimpleNamespace

import pytest

from launch.run.supervise import progress
from launch.run.supervise.progress import JobProgress
from launch.run.supervise.rank_logs import Logs

SLOTS = [SimpleNamespace(rank=rank, host=host) for rank, host in enumerate(("h1", "h1", "h2"))]


class Job:
    """A job of three ranks on two hosts, whose files are made by a test."""

    def __init__(self, folder, *, apart=False, slots=SLOTS):
        self.report, self.run = folder / "report.json", folder / "runs/mine"
        self.logs = Logs(folder=folder / "logs/mine", python="python")
        self.progress = JobProgress(slots, self.logs, self.report, apart=apart)

    def start(self, *ranks):
        for rank in ranks:
            self.logs.folder.mkdir(parents=True, exist_ok=True)
            log = self.logs.file(rank)
            if log.exists():
                log.rename(log.with_suffix(".before.log"))
            log.touch()
        return self.line()

    def line(self):
        return self.progress.line().removeprefix("hvdlaunch: ")

    def train(self, *lines, **facts):
        """Report the run folder, and add lines to its metrics."""
        (self.run / "ranks").mkdir(parents=True, exist_ok=True)
        self.report.write_text(json.dumps({"run_folder": str(self.run), **facts}))
        with (self.run / "metrics.jsonl").open("a") as file:
            file.writelines(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines)
        return self.line()

    def stand(self, *places):
        for rank, place in enumerate(places):
            (self.run / f"ranks/rank-{rank}.at").write_text(f"{place:<63}\n")


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def job(tmp_path, clock):
    return Job(tmp_path)


def report(step, seconds, **more):
    return {"step": step, "seconds": seconds, "train/images_per_s": 1234.5, **more}


def test_ranks_are_up_once_this_attempts_logs_are_there(job, tmp_path):
    assert job.line() == "0 of 2 hosts, 0 of 3 ranks up"
    assert job.start(1) == "1 of 2 hosts, 1 of 3 ranks up"
    assert job.start(0, 2) == "2 hosts, 3 ranks up"
    again = Job(tmp_path)
    assert again.line() == "0 of 2 hosts, 0 of 3 ranks up"
    assert again.start(0) == "1 of 2 hosts, 1 of 3 ranks up"
    assert Job(tmp_path, apart=True).start(0) == "2 hosts, 3 ranks"  # not known where hosts have folders of their own


def test_it_shows_what_rank_0_reports_and_a_step_says_that_all_ranks_are_up(job):
    assert job.train(doing="loading torch, 3 s") == "0 of 2 hosts, 0 of 3 ranks up | loading torch, 3 s"
    assert job.train(report(20, 4.0), doing="step 23\x1b[2J") == "2 hosts, 3 ranks up | step 23\\x1b[2J"


def test_on_one_host_a_line_appears_only_if_it_says_something(tmp_path, clock):
    job = Job(tmp_path, slots=SLOTS[:2])
    assert job.start(0) == "1 of 2 ranks up"
    assert job.start(1) == "2 ranks up"
    assert job.train(doing="step 7") == "step 7"
    job.logs.file(0).write_text("a line of a program without hvdtrain\n")
    assert job.train() == ""


def test_lines_of_an_attempt_before_half_lines_and_strange_ones_do_not_count(job):
    none = job.train(report(20, 4.0))
    assert none == "0 of 2 hosts, 0 of 3 ranks up"
    strange = [
        "\n",
        "[]\n",
        "{\n",
        "[" * 5000 + "\n",
        {"step": "x", "seconds": 1.0, "train/a_per_s": 1.0},
        {"event": 3},
    ]
    assert job.train(*strange, report(99, 9.0, epoch=1), '{"step": 40, "seconds": 5.0, "tra') == none
    with (job.run / "metrics.jsonl").open("r+") as file:  # as a run that is resumed does
        file.truncate(10)
    assert job.line() == none
    assert job.train("\n", '{"step": 60, "seconds": 7.0, "train/') == none
    assert job.train('images_per_s": 1.0}\n') == "2 hosts, 3 ranks up"


@pytest.mark.parametrize("folder", [3, "a\0b", "/nowhere"])
def test_a_report_of_no_run_folder_changes_nothing(job, folder):
    job.report.write_text(json.dumps({"run_folder": folder}))
    assert job.start(0, 1, 2) == "2 hosts, 3 ranks up"


def test_a_group_that_fell_behind_is_shown_for_a_while(job, clock):
    job.train()
    event = {"event": "behind", "step": 40, "host": "h2\x1b[2J", "rank": 2, "lag_s": 3.0, "share": 0.4}
    assert job.train(event, report(40, 8.0)).endswith(" | h2\\x1b[2J (rank 2) fell behind at step 40")
    clock.s += progress.BEHIND_S + 1
    assert job.train(report(60, 12.0)).endswith("ranks up")


def test_while_no_report_comes_those_are_named_for_whom_the_others_wait(job, clock):
    def poll(after_s=progress.POLL_S):
        clock.s += after_s
        return job.line()

    job.train()
    job.stand("start working", "start waiting", "start waiting")
    poll(progress.STALLED_S)
    assert poll().endswith("ranks up | waiting for rank 0 on h1 at the start")
    job.train(report(20, 4.0), report(40, 9.0))
    job.stand("step 41 waiting", "step 41 waiting", "step 41 reading")
    assert poll(14.0).endswith("ranks up")  # three times the five seconds between two reports are not over
    assert poll().endswith("ranks up")  # it may be late for a moment only
    assert poll().endswith(" | waiting for rank 2 on h2 at step 41 while reading")
    job.stand("step 41 waiting", "step 41 working", "step 41 working")
    assert "waiting for rank 2 on h2" in poll(0.5)  # until the next look
    poll()
    assert poll().endswith(" | waiting for rank 1 on h1, rank 2 on h2 at step 41")
    job.stand("step 41 evaluating", "step 41 evaluating", "step 41 evaluating")
    poll()
    assert poll(2 * progress.POLL_S).endswith("ranks up")
