import math

import pytest

from tests.mpi.conftest import end_well, environment, program_of, slow

HASHED = 100  # parameters


@pytest.mark.parametrize(("launcher", "ranks"), [("mpirun", 3), slow("gloo", 2)])
def test_every_collective(run_program, launcher, ranks):
    mean = (ranks - 1) / 2
    for rank, answer in enumerate(run_program(launcher, ranks, "collectives.py")):
        assert (answer["rank"], answer["size"], answer["local"]) == (rank, ranks, [rank, ranks])
        assert answer["gathered"] == [{"rank": one, "text": "ä" * (one + 1)} for one in range(ranks)]
        assert answer["again"] == [[one] * one for one in range(ranks)]
        assert answer["bytes"] == ([str(one) * (one + 1) for one in range(ranks)] if rank == 0 else [])
        assert answer["whole"] == ["", "0", "000", "0000", "0000000000"]
        assert answer["sum"] == [ranks, sum(range(ranks))]
        floats, tens, counter = answer["average"]
        assert floats == pytest.approx([mean] * 6)
        assert tens == pytest.approx([10 * mean])
        assert counter == rank  # integers are not averaged
        assert answer["broadcast"] == [[5.0] * 3, [7.0] * 3]
        assert answer["types"] == [0.0] * 7, "of every type, and in any order in memory"


@pytest.mark.parametrize("reducer", ["horovod", "bucket"])
def test_gradients_are_summed_in_fp16_whatever_their_layout_and_number(run_program, reducer):
    answer, other = run_program("mpirun", 2, "gradients.py", "fp16", reducer)
    assert other == answer
    # 20000 has at most 11 significant bits lost: half a unit in the last place is 2^-11
    large = pytest.approx([40000.0] * 4, rel=2**-11)
    assert answer["large"] == [[math.inf] * 4, large, large]  # at first it is sent as twice as much: fp16 ends before
    assert answer["plain"] == {"used": pytest.approx([3.0] * 4, rel=2**-11), "unused": [0.0, 0.0]}
    assert answer["three_passes"]["used"] == [9.0] * 4
    assert answer["uneven_passes"]["used"] == [3.0] * 4
    assert answer["channels_last"]
    # a hook that hashes its group: 300 * HASHED
    assert all(HASHED < hashes < 20 * HASHED for hashes in answer["hashes"])
    assert answer["empty_share"] == [float(one) for one in range(54)]


@pytest.mark.parametrize("launcher", ["mpirun", "hvdlaunch"])
def test_ranks_of_tests_are_forks_that_have_imported_torch(tmp_path, launcher, monkeypatch):
    environment(tmp_path)  # the keeper starts, if not before
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")  # by a test that imports scikit-learn
    end_well(tmp_path, launcher, 2, [program_of(tmp_path, "import sys\nsys.exit('torch' not in sys.modules)")])
