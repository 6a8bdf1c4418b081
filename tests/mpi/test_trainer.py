"""transformers' Trainer, the pinned one: what docs/how-to/from-hf-trainer.md says of it, and its example."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.mpi.conftest import PROGRAMS, PROJECT
from tests.mpi.launched import argv, finished

pytestmark = pytest.mark.slow  # transformers alone takes seconds to import
PROGRAM = [sys.executable, str(PROGRAMS / "trainer.py"), "."]


def steps(folder, ranks, *words):
    """What the program has found, by head and number of micro-batches."""
    program = [*PROGRAM, *words]
    done = finished(folder, argv("-np", str(ranks), program=program))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "steps.json").read_text())
    return {(step["head"], step["ranks"], step["accumulate"]): step for step in found}


@pytest.mark.parametrize(("ranks", "how"), [(1, "--loss"), (2, "--horovod")])
def test_the_remedies_take_the_exact_step(tmp_path, ranks, how):
    found = steps(tmp_path, ranks, how)
    assert {case[1:] for case in found} == {(ranks, accumulate) for accumulate in ((1, 4, 8) if ranks == 1 else (1, 4))}
    for case, step in found.items():
        assert step["length"] == pytest.approx(1, abs=1e-4), case
        assert step["cosine"] == pytest.approx(1, abs=1e-5), case


def test_all_ranks_of_the_example_stop_early_together_and_rank_0_alone_saves(tmp_path):
    program = [*PROGRAM, "--ends"]
    done = finished(tmp_path, argv("-np", "2", program=program))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"ends-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["steps"] == 3  # two after the best
    assert (tmp_path / "saved-0" / "model.safetensors").exists()
    assert not list(tmp_path.glob("*-1/*"))
    weights = load_file(tmp_path / "saved-0" / "model.safetensors")
    best = load_file(tmp_path / "output-0" / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(weight, best[name]) for name, weight in weights.items())


SEEN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from horovod_trainer import hvd
open(f"{hvd.rank()}.txt", "w").write(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
"""


@pytest.mark.long  # half a minute of imports; the ranks of the example train in the test above
def test_each_rank_of_the_example_sees_one_gpu_of_its_own(run, tmp_path):
    """Of several Trainer uses all, by DataParallel."""
    (tmp_path / "seen.py").write_text(SEEN)
    done = run("mpirun", 2, ["seen.py", str(PROJECT / "docs")], CUDA_VISIBLE_DEVICES="3,5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["3", "5"]
