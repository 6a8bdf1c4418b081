"""Ranks that live on: a program that fails takes none of the next ones with it, one that ends well leaves no trace."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.mpi.conftest import PROGRAMS, command, environment, wait_until
from tests.mpi.pool import Pools, ProgramFailed

WELL = "print('well')"
RANK = "import os\nrank = os.environ['OMPI_COMM_WORLD_RANK']\n"


@pytest.fixture
def pools(tmp_path):
    """Of this test alone."""
    folder = tmp_path / "pools"
    folder.mkdir()
    pools = Pools(folder, command, environment(folder))
    yield pools
    pools.close()


@pytest.fixture
def run(pools, tmp_path):
    """Run these lines of Python on 2 ranks; what each has printed."""

    def start(lines, *, launcher="mpirun", ranks=2, **options):
        program = tmp_path / "program.py"
        program.write_text(lines)
        return pools.run(launcher, ranks, [str(program)], cwd=tmp_path, **options)

    return start


@pytest.mark.parametrize(
    ("lines", "limit_s", "said"),
    [
        (
            "import time\ntime.sleep(600)",
            1,
            ["rank 0: is not at its end after 1 s", "rank 1: is not", 'program.py", line 2'],
        ),
        (RANK + "if rank == '1':\n    raise ValueError('planted')", 60, ["rank 1: Traceback", "ValueError: planted"]),
        (RANK + "if rank == '1':\n    os.kill(os.getpid(), 9)", 60, ["rank 1: died"]),
        ("import sys\nprint('last words')\nsys.exit(3)", 60, ["ended with status 3", "printed:\nlast words"]),
        (
            "import os\nos.environ['HOROVOD_CYCLE_TIME'] = '2'\nimport horovod.torch as hvd\nhvd.init()",
            60,
            ["a program that sets Horovod's cycle time needs an mpirun of its own"],
        ),
    ],
    ids=["hangs", "raises", "is killed", "status", "cycle time"],
)
def test_a_program_that_fails_does_so_alone(pools, run, lines, limit_s, said):
    assert run(WELL) == ["well\n"] * 2
    first = pools.pids("mpirun", 2)
    launcher = psutil.Process(first[0]).parent()
    with pytest.raises(ProgramFailed) as failed:
        run(lines, limit_s=limit_s)
    assert all(words in str(failed.value) for words in said), failed.value
    assert not launcher.is_running()
    assert not any(map(psutil.pid_exists, first))
    assert run(WELL) == ["well\n"] * 2
    assert not set(first) & set(pools.pids("mpirun", 2))


CHANGED = """
import fcntl, os, signal, sys, faulthandler
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    fcntl.flock(os.open("locked", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
import hvdtrain.ranks.connect as comm
import torch
os.environ["HOME"] = "/nowhere"
os.environ["ADDED"] = "1"
os.chdir("/")
sys.path.insert(0, "/nowhere")
sys.argv.append("more")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
faulthandler.dump_traceback_later(1, exit=True)
comm.connect = None
torch.set_num_threads(2)
torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
import horovod.torch as hvd
hvd.init()
"""

TOLD = """
import json, os, signal, sys, torch
import hvdtrain.ranks.connect as comm
import horovod.torch as hvd
print(json.dumps([
    dict(os.environ), os.getcwd(), sys.path[1:], sys.argv, str(signal.getsignal(signal.SIGTERM)),
    sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), comm.connect is None, torch.get_num_threads(),
    str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(), hvd.is_initialized(),
]))
"""


def test_a_program_finds_nothing_of_the_one_before(pools, run, tmp_path):
    before = run(TOLD)
    pids = pools.pids("mpirun", 2)
    run(CHANGED)
    with (tmp_path / "locked").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert run("import time\ntime.sleep(1.5)") == [""] * 2  # longer than the timer
    assert run(TOLD) == before
    assert pools.pids("mpirun", 2) == pids


def test_a_program_has_its_own_folder_arguments_and_environment(pools, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint(os.getcwd(), sys.argv, os.environ['ADDED'], __name__)")
    (said,) = pools.run("python", 1, [str(program), "a", "b"], cwd=tmp_path, ADDED="c")
    assert said == f"{tmp_path} {[str(program), 'a', 'b']} c __main__\n"


def test_collectives_again_and_again_in_one_pool(pools, tmp_path):
    for _ in range(3):
        pools.run("mpirun", 2, [str(PROGRAMS / "collectives.py"), str(tmp_path)], cwd=tmp_path)


def test_no_rank_outlives_a_pytest_that_is_killed(tmp_path):
    (tmp_path / "program.py").write_text("import os, time\nopen(f'pid-{os.getpid()}', 'w')\ntime.sleep(600)")
    driver = (
        "from pathlib import Path\n"
        "from tests.mpi.conftest import command, environment\n"
        "from tests.mpi.pool import Pools\n"
        "here = Path.cwd()\n"
        "Pools(here, command, environment(here)).run('mpirun', 2, ['program.py'], cwd=here)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, env=env) as pytest_:
        pids = wait_until(lambda: len(found := list(tmp_path.glob("pid-*"))) == 2 and found, 60)
        pytest_.send_signal(signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(int(pid.name.removeprefix("pid-"))), 10)
