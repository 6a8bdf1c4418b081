import pytest

from tests.mpi.conftest import slow

LAUNCHES = [
    ("python", 1),
    slow("mpirun", 1),
    ("mpirun", 3),
    slow("mpirun", 2),
    slow("horovodrun", 2),
    slow("horovodrun", 3),
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
        assert answer["sum"] == [ranks, sum(range(ranks))]
        floats, tens, counter = answer["average"]
        assert floats == pytest.approx([mean] * 6)
        assert tens == pytest.approx([10 * mean])
        assert counter == rank  # integers are not averaged
        assert answer["broadcast"] == [[5.0] * 3, [7.0] * 3]


@pytest.mark.parametrize("compression", [slow("none"), "fp16"])
@pytest.mark.parametrize(("launcher", "ranks"), [("python", 1), ("mpirun", 2), slow("horovodrun", 3)])
def test_gradients_are_summed_whatever_their_layout_and_number(run_program, launcher, ranks, compression):
    answers = run_program(launcher, ranks, "gradients.py", compression)
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    # 40000 / ranks has at most 11 significant bits lost in fp16: half a unit in the last place is 2^-11
    assert answer["large"]["used"] == pytest.approx([40000.0] * 4, rel=2**-11 if compression == "fp16" else 1e-6)
    assert answer["three_passes"]["used"] == [3.0 * sum(range(1, ranks + 1))] * 4
    assert answer["uneven_passes"]["used"] == [float(sum(range(1, ranks + 1)))] * 4
    assert "frozen" not in answer["large"]
    if ranks > 1:
        assert answer["large"]["unused"] == [0.0, 0.0]
    assert answer["channels_last"]
    assert answer["empty_share"] == [float(one * max(1, ranks - 1)) for one in range(54)]
