"""--dry-run from its start to its end."""

import json

from tests.mpi.interrupted import refusal

WORDS = ["-m", "hvdtrain.effnet", "--dry-run", "--model", "efficientnet_tiny"]


def test_it_prints_json_and_leaves_nothing(run, tmp_path):
    before = sorted(tmp_path.iterdir())
    done = run("python", 1, [*WORDS, "--json"])
    found = json.loads(done.stdout)
    assert (done.returncode, found["dry_run"], len(found["devices"])) == (0, 1, 4)
    assert sorted(tmp_path.iterdir()) == before


def test_several_ranks_are_refused(run):
    done = run("mpirun", 2, WORDS)
    assert done.returncode == 2
    assert "one rank's step" in refusal(done.stderr)
