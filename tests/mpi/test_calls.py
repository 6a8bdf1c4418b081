"""Ranks that wait in different calls: one line of hvdlaunch names the call of each, and the rank that departs."""

import re

import pytest

from tests.mpi.conftest import PROGRAMS, slow
from tests.mpi.launched import argv, finished
from tests.refusals import require_facts

PROGRAM = PROGRAMS / "calls.py"
LINES = {text: f"calls.py:{number}" for number, text in enumerate(PROGRAM.read_text().splitlines(), start=1)}
LOOP, METRIC, SLEEP = (
    next(place for text, place in LINES.items() if word in text) for word in ("enumerate", "own.metric", "sleep")
)
OWN = f'all-reduce "own.metric" of 8 bytes ({METRIC}), {{}} call N'
AGREE = f"allgather for program/training.py:N ({LOOP}), {{}} call N"
OUTSIDE = "rank 1 is outside of hvdtrain's calls"
SILENT = "it hangs, was stopped, or its host is silent"
LAST = 'its last was all-reduce "sum" of 104 bytes, call N; ranks 0, 2 wait in ' + AGREE.format("their")


@pytest.mark.parametrize(
    ("departure", "status", "said"),
    [
        (
            "extra",
            1,
            (
                f"deadlock, no progress for T: rank 1 waits in {OWN.format('its')}; ranks 0, 2 wait in "
                f"{AGREE.format('their')}: rank 1 made a call that the others did not"
            ),
        ),
        slow(
            "skip",
            1,
            f"deadlock, no progress for T: rank 1 waits in {AGREE.format('its')}; ranks 0, 2 wait in "
            f"{OWN.format('their')}: rank 1 left out a call that the others made",
        ),
        ("stop", 1, f"rank 1 on localhost did not arrive at step 6 ({SILENT}); {OUTSIDE} ... , {LAST}"),
        slow("loop", 1, f"rank 1 on localhost ... at step 6 ... ; {OUTSIDE} ({SLEEP}), {LAST}"),
        ("leave", 7, f"rank 1 on localhost ended with status 7 at step 6; {OUTSIDE}, {LAST}"),
    ],
)
def test_the_rank_that_departs_is_named_with_the_call_of_each(tmp_path, departure, status, said):
    words = [departure, "--report-every-steps", "1", "--epochs", "4", "--batch-size-per-rank", "8"]
    done = finished(tmp_path, argv("-np", "3", program=["python", str(PROGRAM), *words]))
    assert done.returncode == status, done.stderr
    [line] = [one for one in done.stderr.splitlines() if one.startswith("hvdlaunch: error: ")]
    line = re.sub(r"\d+:\d\d:\d\d(\.\d+)?", "T", line.removeprefix("hvdlaunch: error: "))
    require_facts(re.sub(r"(training\.py:|call )\d+", r"\1N", line), said)
