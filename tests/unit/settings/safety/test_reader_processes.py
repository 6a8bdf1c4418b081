import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.settings.safety.reader_processes import READER_OF

PROGRAM = """
import multiprocessing, os, sys, time
import hvdtrain
from hvdtrain.settings.safety.reader_processes import starting

def read(semaphore, end):
    {reads}

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with starting():
        semaphore = context.Semaphore(0)
        context.Process(target=read, args=(semaphore, "x" * 1_000_000)).start()
    assert "{name}" not in os.environ
    print(semaphore._semlock.name, flush=True)
    {ends}
"""


@pytest.mark.parametrize(
    ("reads", "ends"),
    [
        ("time.sleep(60)", "os._exit(1)"),  # before the reader has begun
        ("semaphore.release(); time.sleep(60)", "semaphore.acquire(); os.kill(os.getpid(), 9)"),
    ],
    ids=["at the start", "while it reads"],
)
def test_a_reader_ends_with_its_rank_and_nothing_is_left_or_printed(tmp_path, reads, ends):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(reads=reads, ends=ends, name=READER_OF))
    # It returns once all processes have closed the pipes.
    rank = subprocess.run([sys.executable, program], check=False, capture_output=True, text=True, timeout=50)
    assert rank.returncode in (1, -9)
    assert rank.stderr == ""
    semaphore = rank.stdout.strip().removeprefix("/")
    assert semaphore.startswith("mp-")
    assert not Path(f"/dev/shm/sem.{semaphore}").exists()  # noqa: S108


def test_a_reader_whose_rank_is_gone_ends_when_it_imports_hvdtrain():
    environment = {**os.environ, READER_OF: "1"}
    reader = [sys.executable, "-c", "import hvdtrain; print('goes on')"]
    result = subprocess.run(reader, check=False, env=environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "")
