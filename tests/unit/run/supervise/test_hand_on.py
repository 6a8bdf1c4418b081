"""SIGUSR1 on its way to ranks: real processes, which need no launcher."""

import os
import shlex
import subprocess
import sys
import threading
import time

import pytest

from launch.run.supervise import hand_on
from tests.unit.run.supervise.test_screen import until

WAIT_S = 10.0
# It catches the signal once its folder has a file named go, and ends at the first one.
RANK = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "here").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
time.sleep(100)
"""


@pytest.mark.parametrize("is_behind_a_shell", [False, True])
def test_a_rank_gets_the_signal_once_it_catches_it(tmp_path, monkeypatch, is_behind_a_shell):
    monkeypatch.setattr(hand_on, "MAX_PAUSE_S", 0.05)
    words = [sys.executable, "-IS", "-c", RANK, str(tmp_path)]
    if is_behind_a_shell:
        words = ["sh", "-c", f"{shlex.join(words)}; exit $?"]
    report = str(tmp_path / "report.json")
    others = [{"HVDLAUNCH_REPORT": f"{report}2", "RANK": "0"}, {"HVDLAUNCH_REPORT": report}]
    strangers = [subprocess.Popen(["sleep", "100"], env={**os.environ, **other}) for other in others]
    rank = subprocess.Popen(words, env={**os.environ, "HVDLAUNCH_REPORT": report, "RANK": "0"})
    handing = threading.Thread(target=hand_on.hand_on, args=(report, [0]), daemon=True)
    handing.start()
    until((tmp_path / "here").exists)
    time.sleep(0.15)
    assert (rank.poll(), handing.is_alive()) == (None, True)
    (tmp_path / "go").touch()
    assert rank.wait(WAIT_S) == 5
    handing.join(WAIT_S)
    assert not handing.is_alive()
    for stranger in strangers:
        assert stranger.poll() is None
        stranger.kill()
        stranger.wait()


def test_without_ranks_it_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(hand_on, "ABSENT_S", 0.05)
    hand_on.hand_on(str(tmp_path / "report.json"), [0])
