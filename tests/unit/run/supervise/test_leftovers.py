import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.errors import HostError
from launch.run.restart import fleet
from launch.run.supervise import leftovers

JOB = f"job-{os.getpid()}"  # no other test ends its processes


@pytest.fixture
def start():
    """Start a process that has these variables."""
    running = []

    def one(**variables):
        running.append(subprocess.Popen(["sleep", "100"], env={"PATH": os.environ["PATH"], **variables}))
        while b"sleep" not in Path(f"/proc/{running[-1].pid}/cmdline").read_bytes():
            time.sleep(0.01)
        return running[-1]

    yield one
    for process in running:
        process.kill()
        process.wait()


def test_only_what_a_launcher_has_started_for_this_job_of_this_user_is_ended(start, monkeypatch):
    ranks = [start(HVDLAUNCH_JOB=JOB, HVDLAUNCH_PLAN="{}") for _ in range(2)]
    others = [
        start(HVDLAUNCH_JOB=JOB),  # a shell of the user, who has named the job
        start(HVDLAUNCH_JOB=f"{JOB}2", HVDLAUNCH_PLAN="{}"),
        start(MY_HVDLAUNCH_JOB=JOB, HVDLAUNCH_PLAN="{}"),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert leftovers.end_here(JOB) == 0
    assert leftovers.end_here(JOB) == 2
    assert [process.wait(60) for process in ranks] == [-9, -9]
    assert [process.poll() for process in others] == [None] * len(others)
    assert leftovers.end_here(JOB) == 0


def test_it_ends_neither_itself_nor_who_has_started_it():
    command = f"{sys.executable} -P -m launch.run.supervise.leftovers {JOB}"
    done = subprocess.run(
        ["sh", "-c", f"{command} && echo alive"],
        env={**os.environ, "HVDLAUNCH_JOB": JOB, "HVDLAUNCH_PLAN": "{}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "hvdlaunch-ended 0\nalive\n"


def test_each_host_says_how_many_or_why_not(monkeypatch):
    answers = {"h1": "3", "h2": HostError("host h2: no route to it"), "h3": "", "h4": "-1", "h5": "9" * 5000}

    def ask(host, words, folder, *, mark, timeout_s):
        assert (words, folder) == (["python", "-P", "-m", "launch.run.supervise.leftovers", "my job"], "/here")
        if isinstance(answers[host], HostError):
            raise answers[host]
        return answers[host]

    monkeypatch.setattr(fleet, "is_local", lambda host: host == "localhost")
    ours = {"ssh": SimpleNamespace(ask=ask), "python": "python", "folder": "/here"}
    found = fleet.end_on(["localhost", *answers], "my job", **ours)
    assert [found.pop(name) for name in ("localhost", "h1", "h2")] == [0, 3, answers["h2"]]
    assert all(
        isinstance(error, HostError) and str(error).startswith(f"host {name}: ") for name, error in found.items()
    )
