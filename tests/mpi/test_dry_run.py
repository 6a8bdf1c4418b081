"""--dry-run from its start to its end."""

import json

import pytest

from tests.mpi.conftest import PROJECT, slow, start_in
from tests.mpi.interrupted import refusal

WORDS = ["-m", "hvdtrain.effnet", "--dry-run", "--model", "efficientnet_tiny"]


@pytest.mark.parametrize("words", [WORDS, slow([str(PROJECT / "examples/char_gpt.py"), "--dry-run"])])
def test_it_prints_json_and_leaves_nothing(tmp_path, words):
    before = sorted(tmp_path.iterdir())
    done = start_in(tmp_path, "python", 1, [*words, "--json"])
    found = json.loads(done.stdout)
    assert (done.returncode, found["dry_run"], len(found["devices"])) == (0, 1, 4)
    assert sorted(tmp_path.iterdir()) == before


def test_several_ranks_are_refused(tmp_path):
    done = start_in(tmp_path, "mpirun", 2, WORDS)
    assert done.returncode == 2
    assert "one rank's step" in refusal(done.stderr)
