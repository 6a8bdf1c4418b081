import math

import pytest

from tests.mpi.conftest import slow

HASHED = 100  # parameters

LAUNCHES = [
    ("python", 1),
    ("mpirun", 3),
    slow("horovodrun", 2),
    ("gloo", 2),
]


@pytest.mark.parametrize(("launcher", "ranks"), LAUNCHES)
def test_every_collective_under_every_launcher(run_program, launcher, ranks):
    answers = run_program(launcher, ranks, "collectives.py")
    mean = (ranks - 1) / 2
    for rank, answer in enumerate(answers):
        assert answer["rank"] == rank
        assert answer["size"] == ranks
        assert answer["local"] == [rank, ranks]
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


@pytest.mark.parametrize("reducer", ["horovod", "bucket"])
@pytest.mark.parametrize("compression", [slow("none"), "fp16"])
@pytest.mark.parametrize(("launcher", "ranks"), [("python", 1), ("mpirun", 2)])
def test_gradients_are_summed_whatever_their_layout_and_number(run_program, launcher, ranks, compression, reducer):
    answers = run_program(launcher, ranks, "gradients.py", compression, reducer)
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    # 40000 / ranks has at most 11 significant bits lost in fp16: half a unit in the last place is 2^-11
    large = pytest.approx([40000.0] * 4, rel=2**-11 if compression == "fp16" else 1e-6)
    if compression == "fp16" and ranks > 1:  # at first 40000 is sent as twice as much, which fp16 does not hold
        assert answer["large"] == [[math.inf] * 4, large, large]
    else:
        assert answer["large"] == [large] * 3
    assert answer["plain"]["used"] == pytest.approx([3.0] * 4, rel=2**-11)
    assert answer["three_passes"]["used"] == [3.0 * sum(range(1, ranks + 1))] * 4
    assert answer["uneven_passes"]["used"] == [float(sum(range(1, ranks + 1)))] * 4
    assert "frozen" not in answer["plain"]
    if ranks > 1:
        assert answer["plain"]["unused"] == [0.0, 0.0]
    assert answer["channels_last"]
    assert all(hashes < 20 * HASHED for hashes in answer["hashes"])  # a hook that hashes its group: 300 * HASHED
    if ranks > 1:
        assert all(hashes > HASHED for hashes in answer["hashes"])
    assert answer["empty_share"] == [float(one * max(1, ranks - 1)) for one in range(54)]
