import json
from types import SimpleNamespace

import pytest

from launch.supervise import progress
from launch.supervise.progress import Progress
from launch.supervise.rank_logs import Logs

SLOTS = [SimpleNamespace(rank=rank, host=host) for rank, host in enumerate(("h1", "h1", "h2"))]


class Job:
    """A job of three ranks on two hosts, whose files are made by a test."""

    def __init__(self, folder, *, apart=False):
        self.report, self.run = folder / "report.json", folder / "runs/mine"
        self.logs = Logs(folder=folder / "logs/mine", python="python")
        self.progress = Progress(SLOTS, self.logs, self.report, apart=apart)

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

    def train(self, *lines):
        """Report the run folder, and add lines to its metrics."""
        (self.run / "ranks").mkdir(parents=True, exist_ok=True)
        self.report.write_text(json.dumps({"run_folder": str(self.run)}))
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


def test_step_and_speed_are_those_of_the_run_folder(job):
    job.train()
    shown = job.train(report(20, 4.0), report(40, 8.0), report(99, 9.0, epoch=1))
    assert shown == "2 hosts, 3 ranks up | step 40 | 1,234 images/s"
    assert "step 1,000 | 2.5 texts/s" in job.train({"step": 1000, "seconds": 9.0, "train/texts_per_s": 2.5})
    assert job.train({"event": "lost", "np": 2, "step": 3}).startswith("2 of 3 ranks up")


def test_lines_of_an_attempt_before_half_lines_and_strange_ones_do_not_count(job):
    old = job.train(report(20, 4.0))
    assert "step" not in old
    assert job.train('{"step": 40, "seconds": 5.0, "tra') == old
    assert "step 40 |" in job.train('in/images_per_s": 1.0}\n')
    strange = ["\n", "[]\n", "{\n", "[" * 5000 + "\n", {"step": "x", "seconds": 1.0, "train/a_per_s": 1.0}]
    assert "step 40 |" in job.train(*strange, {"event": 3})
    assert job.train({"step": 50, "seconds": 6.0, "train/images_per_s": None}).endswith("step 50")  # not a number
    with (job.run / "metrics.jsonl").open("r+") as file:  # as a run that is resumed does
        file.truncate(10)
    job.line()
    assert "step 60 |" in job.train("\n", report(60, 7.0))


@pytest.mark.parametrize("folder", [3, "a\0b", "/nowhere"])
def test_a_report_of_no_run_folder_changes_nothing(job, folder):
    job.report.write_text(json.dumps({"run_folder": folder}))
    assert job.start(0, 1, 2) == "2 hosts, 3 ranks up"


def test_a_group_that_fell_behind_is_shown_for_a_while(job, clock):
    job.train()
    event = {"event": "behind", "step": 40, "host": "h2\x1b[2J", "rank": 2, "lag_s": 3.0, "share": 0.4}
    assert job.train(event, report(40, 8.0)).endswith(" | h2\\x1b[2J (rank 2) fell behind at step 40")
    clock.s += progress.BEHIND_S + 1
    assert job.train(report(60, 12.0)).endswith("images/s")


def test_while_no_report_comes_those_are_named_for_whom_the_others_wait(job, clock):
    def look(after_s=progress.LOOK_S):
        clock.s += after_s
        return job.line()

    job.train()
    job.stand("start working", "start waiting", "start waiting")
    look(progress.STALLED_S)
    assert look().endswith("ranks up | waiting for rank 0 on h1 at the start")
    job.train(report(20, 4.0), report(40, 9.0))
    job.stand("step 41 waiting", "step 41 waiting", "step 41 reading")
    assert look(14.0).endswith("images/s")  # three times the five seconds between two reports are not over
    assert look().endswith("images/s")  # it may be late for a moment only
    assert look().endswith(" | waiting for rank 2 on h2 at step 41 while reading")
    job.stand("step 41 waiting", "step 41 working", "step 41 working")
    assert "waiting for rank 2 on h2" in look(0.5)  # until the next look
    look()
    assert look().endswith(" | waiting for rank 1 on h1, rank 2 on h2 at step 41")
    job.stand("step 41 evaluating", "step 41 evaluating", "step 41 evaluating")
    look()
    assert look(2 * progress.LOOK_S).endswith("images/s")
