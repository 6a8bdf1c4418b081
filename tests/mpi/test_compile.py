"""--compile by a compiler that takes a while, as with a cold cache: signals and the watchdog's limits meanwhile."""

import os
import signal

import pytest

from tests.mpi.conftest import PROGRAMS, TIMEOUT_S, end_well, program_of, wait_until
from tests.mpi.interrupted import TINY
from tests.mpi.launched import argv, started
from tests.mpi.test_preemption import ONLY_ASKED, left_well

COMPILE_S = 3
COMPILER = f"""
import os, runpy, sys, time
from functools import partial
from pathlib import Path
import torch
from hvdtrain.settings.safety import watchdog

watchdog.SLOW_S, watchdog.MIN_LIMIT_S = 60.0, 1.0
rank, shapes = os.environ["OMPI_COMM_WORLD_RANK"], set()

def compiled(graph, inputs):
    shapes.add(next(tuple(each.shape) for each in inputs if each.dim() == 4))
    Path(f"shape-{{len(shapes)}}-of-{{rank}}").touch()
    if rank == "1" and len(shapes) >= int(os.environ["COLD_FROM"]):
        time.sleep({COMPILE_S})
    return graph.forward

torch.compile = partial(torch.compile, backend=compiled, dynamic=False)
sys.argv.insert(1, "effnet")
runpy.run_path({str(PROGRAMS / "every_option.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_in_a_first_compile_saves_after_the_step(runs, tmp_path):
    run = runs(2, (*ONLY_ASKED, "--compile"))
    program = ["python", program_of(tmp_path, COMPILER), *run.words, "--run", "r"]
    with started(tmp_path, argv(program=program), COLD_FROM="1") as job:
        wait_until((tmp_path / "shape-1-of-1").exists, TIMEOUT_S)
        os.kill(job.pid, signal.SIGTERM)
        assert left_well(run, run.ended(job)) in (1, 2)


@pytest.mark.slow
@pytest.mark.long  # one to two minutes each, of which the compiler takes most
@pytest.mark.parametrize("cold_from", [1, 2], ids=["cold", "warm"])
def test_the_watchdog_waits_for_a_compile_in_the_first_step_and_for_one_of_another_shape_later(tmp_path, cold_from):
    """Of rank 1, while rank 0 waits in a sum; the last batch of the epoch, in step 6, is smaller."""
    words = [*TINY, "--batch-size-per-rank", "64", "--epochs", "1", "--images=700", "--compile", "--run", "r"]
    end_well(tmp_path, "mpirun", 2, [program_of(tmp_path, COMPILER), *words], COLD_FROM=str(cold_from))
    assert (tmp_path / "shape-2-of-1").exists()
