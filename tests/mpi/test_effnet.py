"""The program itself, under each launcher: what it leaves behind, and how it ends."""

import json
import os
import platform
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.mpi.conftest import (
    EFFNET,
    PROJECT,
    QUICK,
    TIMEOUT_S,
    command,
    end_well,
    environment,
    left_in,
    program_of,
    rank_pids,
    running_in,
    wait_until,
)
from tests.mpi.interrupted import refusal

RANKS = 2
IMAGES = 1438  # of the digits, to train on


def only_line(done):
    """The one line that the program itself printed on its way out."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "hvdtrain: " in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


ANNOUNCES = f"""\
import runpy, sys
from hvdtrain.program import fit

fit.LONG_S = float(sys.argv.pop(1))
runpy.run_path({EFFNET[0]!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_long_epoch_is_announced_before_the_first_step_and_changes_no_weight(tmp_path):
    words = [program_of(tmp_path, ANNOUNCES), "effnet", *QUICK, "--images=256", "--run"]
    usual, long = (end_well(tmp_path, "mpirun", RANKS, [words[0], limit, *words[1:], limit]) for limit in ("600", "0"))
    assert "hvdtrain: note" not in usual
    before, _, after = long.partition(
        "hvdtrain: note: an epoch will take about 0 minutes on these CPUs. For a training"
    )
    assert ("run folder: " in before, "epoch   1/1" in before, "epoch   1/1" in after) == (True, False, True)
    assert "hvdtrain: note" not in after
    facts = [json.loads(file.read_text()) for file in (tmp_path / "runs" / "effnet").glob("*/ranks/rank-*.json")]
    assert (len(facts), len({one["weights_sha256"] for one in facts})) == (2 * RANKS, 1)


@pytest.mark.parametrize(("launcher", "epochs", "reducer"), [("mpirun", 2, "horovod"), ("horovodrun", 1, "bucket")])
def test_a_run_leaves_a_whole_run_folder(run, tmp_path, launcher, epochs, reducer):
    given = {"HOROVOD_FUSION_THRESHOLD": str(2**19), "HOROVOD_AUTOTUNE": "1"}  # as horovodrun would set them
    given |= {"HOROVOD_AUTOTUNE_LOG": "tuned", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}
    given |= {"HOROVOD_TIMELINE": str(tmp_path / "timeline")}
    obeyed = reducer == "horovod"
    words = [*EFFNET, *QUICK[:-1], str(epochs), "--reducer", reducer, "--run", "e/r"]
    done = run(launcher, RANKS, words, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert said.count("hvdtrain: warning: HOROVOD_AUTOTUNE: no effect with --reducer bucket") == (not obeyed)
    assert (tmp_path / "tuned").exists() is obeyed
    # several gradients at once, or buckets, which are not copied
    assert ("MEMCPY_IN_FUSION_BUFFER" in (tmp_path / "timeline").read_text()) is obeyed
    assert "global batch: 128 images (2 replica" in said
    assert said.count("run folder: runs/e/r") == 1
    folder = tmp_path / "runs" / "e" / "r"
    config = json.loads((folder / "config.json").read_text())
    assert config["fusion_threshold_mb"] == config["derived"]["fusion_threshold_mb"] == 0.5
    assert config["model"] == "efficientnet_tiny"
    result = json.loads((folder / "result.json").read_text())
    ends = [-(-IMAGES // 128) * epoch for epoch in range(1, epochs + 1)]
    assert (result["exit_reason"], result["np"], result["epochs"]) == ("finished", RANKS, epochs)
    assert (result["global_batch"], result["steps"]) == (128, ends[-1])
    everything = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reports, lines = ([line for line in everything if ("epoch" in line) is epoch] for epoch in (False, True))
    assert [line["step"] for line in reports] == sorted({*range(20, ends[-1] + 1, 20), *ends})
    for line in reports:
        assert line["train/grad_norm"] > 0
        speeds = [line[f"train_by_rank/images_per_s_rank{rank}"] for rank in range(RANKS)]
        assert min(speeds) > 0
        assert sum(speeds) == pytest.approx(line["train/images_per_s"])
    assert [line["step"] for line in lines] == ends
    assert lines[-1]["eval/accuracy"] == result["eval_accuracy"]
    losses = [line["train/loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    ranks_left = [json.loads((folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    assert [one["rank"] for one in ranks_left] == list(range(RANKS))
    assert len({one["weights_sha256"] for one in ranks_left}) == 1
    resident = [one["memory"]["resident_mib"] for one in ranks_left]
    assert min(resident) > 100  # torch alone
    assert result["memory"] == {"resident_mib": max(resident), "resident_rank": resident.index(max(resident))}
    assert len(json.loads((folder / "placement.json").read_text())["ranks"]) == RANKS
    assert json.loads((folder / "environment.json").read_text())["mpi"].startswith("Open MPI v")
    events = EventAccumulator(str(folder)).Reload()
    assert [one.step for one in events.Scalars("eval/accuracy")] == ends
    assert [one.step for one in events.Scalars("train/loss")] == [line["step"] for line in reports]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.slow
@pytest.mark.long  # a C++ compiler works for minutes
@pytest.mark.timeout(600)
def test_a_compiled_model_trains_alike_on_two_ranks(run, tmp_path):
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r", "--compile"], MPIEXEC_TIMEOUT="500")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    assert json.loads((folder / "result.json").read_text())["exit_reason"] == "finished"
    assert len({json.loads(file.read_text())["weights_sha256"] for file in folder.glob("ranks/rank-*.json")}) == 1


NO_PROCESS = """\
import sys

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")


def refuse(event, arguments):
    if event in STARTS:
        raise RuntimeError(f"{event} {arguments}")


sys.addaudithook(refuse)
"""


def test_one_process_needs_no_mpi_starts_no_other_and_its_run_is_not_overwritten_unasked(run, tmp_path):
    hidden = tmp_path / "hidden"
    for package in ("mpi4py", "horovod"):
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text("raise ImportError('hidden')\n")
    (hidden / "sitecustomize.py").write_text(NO_PROCESS)
    words = [*EFFNET, *QUICK, "--images=256", "--run", "r"]
    end_well(tmp_path, "python", 1, words, PYTHONPATH=f"{hidden}:{PROJECT}")
    folder = tmp_path / "runs" / "effnet" / "r"
    assert json.loads((folder / "environment.json").read_text())["platform"] == platform.platform()
    result = (folder / "result.json").read_bytes()
    assert json.loads(result)["exit_reason"] == "finished"
    refused = run("mpirun", 2, words)
    assert refused.returncode == 2
    assert "--overwrite" in only_line(refused)
    assert (folder / "result.json").read_bytes() == result


NO_TORCH = """\
import os, sys

if "OMPI_COMM_WORLD_RANK" in os.environ:  # horovodrun itself imports it
    sys.modules.update(dict.fromkeys(("torch", "torchvision", "numpy")))
"""


@pytest.fixture
def no_torch(tmp_path):
    """Variables in which every import of torch on a rank fails, and of what else is heavy."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(NO_TORCH)
    return {"PYTHONPATH": f"{tmp_path / 'hidden'}:{PROJECT}"}


def test_settings_are_refused_before_torch_is_imported(run, no_torch):
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--recipe", "soup"], **no_torch)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "soup" in only_line(done)


def test_ctrl_c_ends_all_ranks_and_leaves_a_readable_run_folder(tmp_path):
    argv = command("mpirun", RANKS, [*EFFNET, *QUICK[:-1], "1000", "--images=128", "--run", "r"])
    folder = tmp_path / "runs" / "effnet" / "r"
    metrics = folder / "metrics.jsonl"
    with running_in(tmp_path, argv, environment(tmp_path)) as job:
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, TIMEOUT_S)
        assert len(rank_pids(folder)) == RANKS
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does
        assert job.wait(timeout=10) != 0
        wait_until(lambda: not left_in(tmp_path), 5)
    result = json.loads((folder / "result.json").read_text())
    assert result["exit_reason"] in ("interrupted", "terminated")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert result["steps"] == lines[-1]["step"]
    whole = [path for path in (folder / "checkpoints").iterdir() if path.name[0] != "."]  # a save may be cut off
    assert all((path / "manifest.json").exists() for path in whole)


# --- --dry-run

DRY = ["-m", "hvdtrain.effnet", "--dry-run", "--model", "efficientnet_tiny"]


def test_it_prints_json_and_leaves_nothing(run, tmp_path):
    before = sorted(tmp_path.iterdir())
    done = run("python", 1, [*DRY, "--dry-run=json,v100"])
    found = json.loads(done.stdout)
    assert (done.returncode, found["dry_run"], len(found["devices"])) == (0, 1, 1)
    assert sorted(tmp_path.iterdir()) == before


def test_several_ranks_are_refused(run):
    done = run("mpirun", 2, DRY)
    assert done.returncode == 2
    assert "one rank's step" in refusal(done.stderr)
