"""The verdict of bench/survival.py on what is left of a run."""

import json

import numpy as np
import pytest

from bench.survival import SIDES, Verdict

WEIGHTS = np.arange(3, dtype=np.float32)
STRUCK = 100.0


@pytest.fixture
def judge(tmp_path):
    """Judge a run of which rank 1 was struck in step 25; ranks by the steps that they began, and when."""

    def make(*, fault="kill", statuses=(0,), steps=None, weights=WEIGHTS, output=""):
        notes = tmp_path / "notes"
        notes.mkdir()
        (notes / "struck").write_text(str(STRUCK))
        attempts = [{"began": 0.0, "status": status, "ended": STRUCK + 10} for status in statuses]
        (tmp_path / "run.json").write_text(json.dumps(attempts))
        (tmp_path / "output-0-localhost").write_text(output)
        for process, began in (steps or {"rank-0-1": [(24, 99.0), (25, 99.5), (26, 101.0), (27, 102.0)]}).items():
            (notes / f"{process}.steps").write_text("".join(f"{number} {time}\n" for number, time in began))
        for rank, of_rank in enumerate([weights] if weights is None or weights.ndim == 1 else weights):
            if of_rank is not None:
                np.save(notes / f"rank-{rank}-{rank + 1}.npy", of_rank)
        return Verdict(SIDES["torchrun"], fault, tmp_path)

    return make


def test_a_restart_from_a_checkpoint(judge):
    resumed = [(21, 103.0), (22, 104.0)]
    verdict = judge(steps={"rank-0-7": [(24, 99.0), (25, 99.9)], "rank-0-1": resumed})
    assert (verdict.survived, verdict.went_on(), verdict.equal(WEIGHTS)) == ("yes", (4.0, 4), "yes")


def test_nothing_was_lost(judge):
    assert judge().went_on() == (2.0, 0)


@pytest.mark.parametrize(
    ("fault", "statuses", "weights", "word"),
    [
        ("kill", (1, 0), WEIGHTS, "again"),
        ("term", (1, 0), WEIGHTS, "yes"),  # a stop was asked for
        ("kill", (1, 1), None, "no"),
        ("hang", (None, 1), None, "hangs"),
        ("nan", (0,), WEIGHTS * np.nan, "NaN"),
    ],
)
def test_how_a_run_came_to_its_end(judge, fault, statuses, weights, word):
    assert judge(fault=fault, statuses=statuses, weights=weights).survived == word


def test_data_are_refused_before_the_first_step(judge):
    assert judge(fault="data", statuses=(2, 0), steps={"rank-0-1": [(1, STRUCK + 20)]}).survived == "refused"


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        (WEIGHTS, "yes"),
        (WEIGHTS * (1 + 1e-6), "rounded"),
        (WEIGHTS + 1, "no"),
        (np.stack([WEIGHTS, WEIGHTS + 1]), "ranks differ"),
    ],
)
def test_weights_are_compared(judge, weights, word):
    assert judge(weights=weights.astype(np.float32)).equal(WEIGHTS) == word


@pytest.mark.parametrize(
    ("output", "culprit", "word"),
    [
        ("", 1, "no"),
        ("exitcode: -9) local_rank: 1", 1, "yes"),
        ("exitcode: 1) local_rank: 0", 1, "rank 0"),
        ("rank 0 waits in the gradients", 1, "no"),
        ("rank 0 waits in the gradients; rank 1 waits in allgather: rank 1 made a call that rank 0 did not", 1, "yes"),
        ("[rank0]:     torch.load('a.pt')", "a.pt", "no"),  # the program's source
        ("skipping damaged a.pt", "a.pt", "yes"),
    ],
)
def test_who_is_named(judge, output, culprit, word):
    assert judge(output=output).named(culprit) == word
