import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from launch.errors import HostError
from launch.supervise import leftovers

NAP = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def start():
    """Start a process that has these variables."""
    running = []

    def one(*words, **variables):
        running.append(subprocess.Popen(words or NAP, env={"PATH": os.environ["PATH"], **variables}))
        return running[-1]

    yield one
    for process in running:
        process.kill()
        process.wait()


def test_only_what_a_launcher_has_started_for_this_job_is_ended(start):
    ranks = [start(HVDLAUNCH_JOB="mine", HVDLAUNCH_PLAN="{}") for _ in range(2)]
    others = [
        start(HVDLAUNCH_JOB="mine"),  # a shell of the user, who has named the job
        start(HVDLAUNCH_JOB="mine2", HVDLAUNCH_PLAN="{}"),
        start(HVDLAUNCH_JOB="min", HVDLAUNCH_PLAN="{}"),
        start(MY_HVDLAUNCH_JOB="mine", HVDLAUNCH_PLAN="{}"),
        start(HVDLAUNCH_PLAN="{}"),
    ]
    time.sleep(0.2)  # until they have become what they are
    assert leftovers.end_here("mine") == 2
    assert [process.wait(5) for process in ranks] == [-9, -9]
    assert [process.poll() for process in others] == [None] * len(others)
    assert leftovers.end_here("mine") == 0


def test_it_ends_neither_itself_nor_who_has_started_it(start):
    words = [sys.executable, "-P", "-m", "launch.supervise.leftovers", "mine"]
    shell = f"{' '.join(words)} > /dev/null; {' '.join(words)} && echo alive"
    done = subprocess.run(
        ["sh", "-c", shell],
        env={**os.environ, "HVDLAUNCH_JOB": "mine", "HVDLAUNCH_PLAN": "{}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "hvdlaunch-ended 0\nalive\n"


def test_each_host_says_how_many_or_why_not(monkeypatch):
    silent = HostError("host h2: no route to it")

    class Reached:
        def ask(self, host, words, folder, *, mark, timeout_s):
            assert (words, folder) == (["python", "-P", "-m", "launch.supervise.leftovers", "my job"], "/here")
            if host == "h2":
                raise silent
            return "3"

    monkeypatch.setattr(leftovers, "is_local", lambda host: host == "localhost")
    ours = {"ssh": Reached(), "python": "python", "folder": "/here"}
    assert leftovers.end_on(["localhost", "h1", "h2"], "my job", **ours) == {"localhost": 0, "h1": 3, "h2": silent}
    assert leftovers.end_on([], "my job", **ours) == {}


@pytest.mark.parametrize("answer", ["", "three", "-1", "3.5", "9" * 5000, "\x1b[31m3"])
def test_an_answer_that_is_no_number_names_the_host(monkeypatch, answer):
    ssh = SimpleNamespace(ask=lambda *_, **__: answer)
    monkeypatch.setattr(leftovers, "is_local", lambda _: False)
    found = leftovers.end_on(["h1"], "my job", ssh=ssh, python="python", folder="/here")["h1"]
    assert isinstance(found, HostError)
    assert str(found).startswith("host h1: ")
    assert str(found).isprintable()
