import itertools
import json

import pytest

from tests.mpi.conftest import PROGRAMS, slow

BANDWIDTH = ["-m", "hvdtrain.bandwidth", "--json", "report.json", "--repeats", "3"]
OVER = ["ours", "mpi4py", "gloo"]


def test_sums_and_exchanges_of_each_size_are_timed_and_right(run, tmp_path):
    done = run("mpirun", 3, [*BANDWIDTH, "--sizes", "4,1KB,1MB", "--over", ",".join(OVER), "--pairs"])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["ranks_per_host"], report["device"]) == (3, 3, "cpu")
    sizes = (4, 1024, 2**20)
    sums = [(one["bytes"], one["over"]) for one in report["measured"]]
    assert sums == list(itertools.product(sizes, OVER))
    for one in report["measured"]:
        assert len(one["times_s"]) == 3
        assert one["algorithm_gb_per_s"] == pytest.approx(one["bytes"] / sorted(one["times_s"])[1] / 1e9)
        assert one["bus_gb_per_s"] == pytest.approx(one["algorithm_gb_per_s"] * 4 / 3)
        assert f"{one['over']:<7} {one['median_s'] * 1e3:9.3f} ms" in done.stdout
    assert "ours latency" in done.stdout.splitlines()[-1]
    exchanges = [(tuple(one["ranks"]), one["bytes"]) for one in report["pairs"]]
    assert exchanges == list(itertools.product([(0, 1), (0, 2), (1, 2)], sizes))
    for one in report["pairs"]:
        assert one["gb_per_s"] == pytest.approx(one["bytes"] / min(one["times_s"]) / 1e9)


def test_a_wrong_sum_ends_all_ranks_with_status_1(run, tmp_path):
    done = run("mpirun", 2, [str(PROGRAMS / "wrong_sum.py"), *BANDWIDTH[2:], "--sizes", "64KB,1MB"])
    assert done.returncode == 1
    assert "hvdtrain: error: all-reduce of 64KB over ours: wrong result on rank 1." in done.stderr
    assert "1MB" not in done.stdout
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("launcher", "ranks", "over", "complaint"),
    [
        ("python", 1, "ours", "mpirun -np 2 python -m hvdtrain.bandwidth"),
        slow("gloo", 2, "mpi4py", "--over mpi4py: horovodrun --gloo starts no MPI"),
        slow("mpirun", 2, "ours,two-level", "--over ours,two-level: Horovod joins the ranks of one host"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_a_status(run, tmp_path, launcher, ranks, over, complaint):  # noqa: PLR0917
    done = run(launcher, ranks, [*BANDWIDTH, "--over", over])
    assert done.returncode == (1 if launcher == "gloo" else 2)  # horovodrun has a status of its own
    [said] = [line for line in done.stderr.splitlines() if "hvdtrain: " in line]
    assert complaint in said
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_exchanges_by_torch_as_between_gpus(run_program):
    assert run_program("mpirun", 3, "exchange.py") == [[True, True]] * 3
