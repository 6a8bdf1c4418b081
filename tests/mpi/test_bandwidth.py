import json

import pytest

from tests.mpi.conftest import PROGRAMS, slow

BANDWIDTH = ["-m", "hvdtrain.bandwidth", "--json", "report.json", "--repeats", "3"]


@pytest.mark.parametrize(
    ("launcher", "ranks", "over"),
    [
        ("mpirun", 2, ["ours", "mpi4py", "gloo"]),
        ("mpirun", 3, ["ours"]),
        slow("horovodrun", 2, ["mpi4py"]),
        slow("gloo", 2, ["ours", "gloo"]),
    ],
)
def test_sums_of_each_size_are_timed_and_right(run, tmp_path, launcher, ranks, over):
    done = run(launcher, ranks, [*BANDWIDTH, "--sizes", "4,1KB,1MB", "--over", ",".join(over)])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["ranks_per_host"], report["device"]) == (ranks, ranks, "cpu")
    assert [(one["bytes"], one["over"]) for one in report["measured"]] == [
        (size, name) for size in (4, 1024, 2**20) for name in over
    ]
    for one in report["measured"]:
        assert len(one["times_s"]) == 3
        assert 0 < one["low_s"] <= one["median_s"] <= one["high_s"]
        assert one["algorithm_gb_per_s"] == pytest.approx(one["bytes"] / sorted(one["times_s"])[1] / 1e9)
        assert one["bus_gb_per_s"] == pytest.approx(one["algorithm_gb_per_s"] * 2 * (ranks - 1) / ranks)
        assert f"{one['over']:<7} {one['median_s'] * 1e3:9.3f} ms" in done.stdout
    assert f"{over[0]} latency" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_every_two_ranks_of_a_host_exchange(run, tmp_path, ranks):
    done = run("mpirun", ranks, [*BANDWIDTH, "--sizes", "4,1MB", "--pairs", "--quiet", "--limit-s", "30"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["measured"]) == 2
    pairs = [[a, b] for a in range(ranks) for b in range(a + 1, ranks)]
    assert [(one["ranks"], one["bytes"]) for one in report["pairs"]] == [
        (pair, size) for pair in pairs for size in (4, 2**20)
    ]
    for one in report["pairs"]:
        assert len(one["times_s"]) == 3
        assert one["gb_per_s"] == pytest.approx(one["bytes"] / min(one["times_s"]) / 1e9)


def test_a_wrong_sum_ends_all_ranks_with_status_1(run, tmp_path):
    done = run("mpirun", 2, [str(PROGRAMS / "wrong_sum.py"), *BANDWIDTH[2:], "--sizes", "64KB,1MB"])
    assert done.returncode == 1
    assert "hvdtrain: error: all-reduce of 64KB over ours: wrong result on rank 1." in done.stderr
    assert "1MB" not in done.stdout
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("launcher", "ranks", "words", "complaint"),
    [
        ("python", 1, [], "mpirun -np 2 python -m hvdtrain.bandwidth"),
        slow("mpirun", 1, [], "mpirun -np 2 python -m hvdtrain.bandwidth"),
        ("mpirun", 2, ["--sizes", "1KB,2.5MB"], "--sizes '2.5MB': "),
        slow("gloo", 2, ["--over", "mpi4py"], "--over mpi4py: horovodrun --gloo starts no MPI"),
        slow("mpirun", 2, ["--over", "ours,two-level"], "--over ours,two-level: Horovod joins the ranks of one host"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(  # noqa: PLR0917
    run, tmp_path, launcher, ranks, words, complaint
):
    done = run(launcher, ranks, [*BANDWIDTH, *words])
    assert done.returncode == (1 if launcher == "gloo" else 2)  # horovodrun has a status of its own
    said = [line for line in done.stderr.splitlines() if "hvdtrain: " in line]
    assert len(said) == 1
    assert complaint in said[0]
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_exchanges_by_torch_as_between_gpus(run, tmp_path):
    done = run("mpirun", 3, [str(PROGRAMS / "exchange.py"), str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)] == [[True, True]] * 3
