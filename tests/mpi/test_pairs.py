"""Options that work together do: real ranks train with sets of them, in which each pair of the table is."""

import json
import math

import pytest

from hvdtrain.tasks.vision import settings as images
from tests import texts
from tests.mpi.conftest import PROGRAMS, end_well
from tests.pairs import programs, trials, words_of

DIGITS = "--data digits --model efficientnet_tiny --epochs 1 --checkpoint-every 2steps"
TEXTS = "--data json --data-dir texts --vocab-size 200 --accumulate-steps 1 --epochs 1 --checkpoint-every 2steps"
SPLIT = {"--stages 2", "--tensor 2"}
GROUPED = {"--sync two-level", "--sync local"}


def marked(options):
    """A trial; for those that compile a C++ compiler works for a minute, and test_compile.py has one for CI."""
    return pytest.param(options, id=" ".join(options), marks=[pytest.mark.long] * ("--compile" in options))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [marked(options) for options in trials()])
def test_options_of_the_table_that_work_together_train(tmp_path, options):
    is_images = programs(options)[0] is images
    name, words, batch = ("effnet", DIGITS, 16) if is_images else ("bert", TEXTS, 8)
    if not is_images:
        texts.put(tmp_path / "texts", train=96)
    program = [str(PROGRAMS / "on_cpus.py"), name, "--images=192"]
    ranks = 4 if SPLIT & {*options} and GROUPED & {*options} else 2
    sized = ["--global-batch-size", str(batch)]  # the last word counts
    end_well(tmp_path, "mpirun", ranks, [*program, *words.split(), "--run", "r", *words_of(options), *sized])
    [file] = tmp_path.glob("runs/*/r/result.json")
    result = json.loads(file.read_text())
    assert (result["np"], result["exit_reason"]) == (ranks, "finished")
    assert math.isfinite(result["eval_loss"])
    assert result["steps"] >= 2
    skipped = result["skipped_steps"]
    assert skipped < result["steps"] if "--precision fp16" in options else skipped == 0  # its first scale is large
