"""Newcomers take the places of ranks that were lost; under Open MPI 5, skipped with any other."""

import json

import pytest

from tests.mpi import launched
from tests.mpi.conftest import EFFNET
from tests.mpi.test_elastic import (
    LIMIT_S,
    PER_RANK,
    WORDS,
    changes,
    pytestmark,  # noqa: F401
    require_each_image_once,
    require_equal_replicas,
    start,  # noqa: F401
)


@pytest.fixture
def grow(start, tmp_path):  # noqa: F811
    """Train 3 ranks to the end, with these faults: the result, and whom it has lost and who has joined, in order."""

    def train(*faults, epochs=12):
        start(3, "--grow", "--epochs", str(epochs), fault=",".join(faults)).wait(LIMIT_S)
        result = json.loads((tmp_path / "runs/effnet/r/result.json").read_text())
        assert result["exit_reason"] == "finished", (tmp_path / "out").read_text()
        return result, [(one["event"], one["ranks"]) for one in changes(tmp_path)]

    return train


def test_a_newcomer_takes_the_place_of_a_rank_that_was_lost(grow, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(2**19))  # ranks have another once they have joined
    result, seen = grow("kill@rank2:step4")
    assert seen == [("lost", [2]), ("joined", [3])]
    assert changes(tmp_path)[1]["in_place_of"] == [2]
    assert (result["lost_ranks"], result["joined_ranks"], result["recoveries"]) == (1, 1, 1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "runs/effnet/r").rglob("*"))
    require_equal_replicas(tmp_path, [0, 1, 3])
    require_each_image_once(tmp_path, epochs=12)


def test_a_newcomer_leads_once_all_others_are_lost(grow, tmp_path):
    _, seen = grow("kill@rank0:step4", "kill@rank1:step150", "kill@rank2:step170", epochs=24)
    assert seen[:2] == [("lost", [0]), ("joined", [3])]
    assert [who for what, who in seen if what == "lost"] == [[0], [1], [2]]
    require_each_image_once(tmp_path, epochs=24)
    result = json.loads((tmp_path / "runs/effnet/r/result.json").read_text())
    assert (result["np"], result["epochs"], result["lost_ranks"]) == (3, 24, 3)


@pytest.mark.parametrize(
    ("fault", "lost"),
    [("kill@rank3:recover1", []), ("kill@rank0:recover2", [0])],
    ids=["newcomer", "the lowest"],
)
def test_a_death_in_a_join(grow, tmp_path, fault, lost):
    """The others go on, and take in another newcomer."""
    _, seen = grow("kill@rank1:step4", fault, epochs=24)
    assert seen[0] == ("lost", [1])
    assert [who for what, who in seen[1:] if what == "lost"] == ([lost] if lost else [])
    assert [what for what, _ in seen].count("joined") >= 1
    require_each_image_once(tmp_path, epochs=24)


def test_a_newcomer_that_ends_in_its_imports_is_followed_by_another(start, tmp_path):  # noqa: F811
    code = "import os, runpy, hvdtrain, torch; os.environ.get('_HVDTRAIN_NEWCOMER') == '2' and os.kill(os.getpid(), 9)"
    code += "; runpy.run_module('hvdtrain.effnet', run_name='__main__', alter_sys=True)"
    words = (*WORDS, *PER_RANK, "--grow", "--epochs", "60")
    start(2, *words, fault="kill@rank1:step4", program=["-c", code]).wait(LIMIT_S)
    assert [(one["event"], one["ranks"]) for one in changes(tmp_path)] == [("lost", [1]), ("joined", [3])]
    assert "hvdtrain: warning: no replacement for rank 1 yet (" in (tmp_path / "out").read_text()


def test_under_hvdlaunch_a_newcomer_takes_the_place_of_the_plan_and_the_run_ends_well(tmp_path):
    """Whatever mpirun ends with, and says, when newcomers leave without MPI_Finalize."""
    program = ["python", *EFFNET, *WORDS, *PER_RANK, "--epochs", "14"]
    argv = launched.argv("--elastic", "--grow", program=program)
    done = launched.finished(tmp_path, argv, HVDTRAIN_FAULT="kill@rank1:step4", TESTS_SIDE="32")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "joined, replacing rank 1; 2 ranks continue after" in said
    assert "prterun" not in said
    facts = [json.loads((tmp_path / f"runs/effnet/r/ranks/rank-{rank}.json").read_text()) for rank in (1, 2)]
    assert facts[0]["cores"] == facts[1]["cores"]


def test_a_run_that_ends_before_a_newcomer_is_there_leaves_none(grow, tmp_path):
    _, seen = grow("kill@rank1:step4", epochs=2)
    assert seen == [("lost", [1])]
