"""Hosts end with their test, and leave nothing on the machine."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.hosts import PROJECT, Cluster

PROGRAM = """
import sys, time, pathlib
from tests.cluster.hosts import Cluster
with Cluster(pathlib.Path(sys.argv[1])) as cluster:
    cluster.start("h1", ["sleep", "1000"])
    cluster.mute_sshd("h2")
    print("made", flush=True)
    time.sleep(1000)
"""


def machine() -> tuple[str, str]:
    """What a cluster must not touch: the machine's interfaces and mounts."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return links, Path("/proc/self/mountinfo").read_text()


def living_in(folder: Path) -> list[str]:
    """Pids of the processes, on all hosts, that have to do with a folder by their mounts, their words or their log."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = str((process / "fd/2").readlink())
            if str(folder) in (process / "mountinfo").read_text() + (process / "cmdline").read_text() + log:
                found.append(process.name)
    return found


def test_nothing_is_left_of_clusters_that_lived_at_once(tmp_path: Path) -> None:
    before = machine()
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with Cluster(folders[0]) as one, Cluster(folders[1]) as other:
        one.start("h1", ["sleep", "1000"])
        one.mute_sshd("h1")
        other.kill("h2")
        other.hide("h1", PROJECT)
        assert machine() == before
        assert len(living_in(tmp_path)) > 10
    assert living_in(tmp_path) == []
    assert machine() == before


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path) -> None:
    before = machine()
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=PROJECT, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == "made\n"
        assert len(living_in(tmp_path)) > 10
        test.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while living_in(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert machine() == before
