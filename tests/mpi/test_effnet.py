"""The program itself, under each launcher: what it leaves behind, and how it ends."""

import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hvdtrain
from tests.mpi.conftest import (
    EFFNET,
    PROJECT,
    QUICK,
    TIMEOUT_S,
    end_well,
    left_in,
    one_torn_image,
    program_of,
    rank_pids,
    slow,
    wait_until,
)
from tests.mpi.forks import BY_ITSELF

LONG = [*QUICK[:-1], "1000", "--run", "r"]


def only_line(done):
    """The one line that the program itself printed on its way out."""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "hvdtrain: " in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("launcher", "ranks", "epochs", "options"),
    [
        ("python", 1, 1, []),
        ("mpirun", 2, 2, ["--reducer", "horovod"]),
        ("horovodrun", 2, 1, []),
        ("hvdlaunch", 2, 1, []),
    ],
)
def test_a_run_leaves_a_whole_run_folder(run, tmp_path, *, launcher, ranks, epochs, options):
    given = {"HOROVOD_FUSION_THRESHOLD": str(2**19), "HOROVOD_AUTOTUNE": "1"}  # as horovodrun would set them
    given |= BY_ITSELF if launcher == "horovodrun" else {}
    given |= {"HOROVOD_AUTOTUNE_LOG": "tuned", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}
    given |= {"HOROVOD_TIMELINE": str(tmp_path / "timeline")}
    program = EFFNET if options else ["-m", "hvdtrain.effnet"]  # word by word, as a user starts it
    words = [*program, *QUICK[:-1], str(epochs), *options]
    done = run(launcher, ranks, [*words, "--run", "r", "--experiment", "e"], **given)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    obeyed = bool(options)
    assert said.count("hvdtrain: warning: HOROVOD_AUTOTUNE: no effect with --reducer bucket") == (not obeyed)
    assert (tmp_path / "tuned").exists() is obeyed
    if ranks > 1:  # several gradients at once, or buckets, which are not copied
        assert ("MEMCPY_IN_FUSION_BUFFER" in (tmp_path / "timeline").read_text()) is obeyed
    assert f"global batch: {64 * ranks} images ({ranks} replica" in said
    assert said.count("run folder: runs/e/r") == 1
    folder = tmp_path / "runs" / "e" / "r"
    config = json.loads((folder / "config.json").read_text())
    assert config["fusion_threshold_mb"] == config["derived"]["fusion_threshold_mb"] == 0.5
    result = json.loads((folder / "result.json").read_text())
    assert result["exit_reason"] == "finished"
    assert (result["np"], result["epochs"], result["global_batch"]) == (ranks, epochs, 64 * ranks)
    per_epoch = -(-1438 // (64 * ranks))
    ends = [per_epoch * epoch for epoch in range(1, epochs + 1)]
    assert result["steps"] == ends[-1]
    everything = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    reports, lines = ([line for line in everything if ("epoch" in line) is epoch] for epoch in (False, True))
    due = {*range(20, result["steps"] + 1, 20), *ends}
    assert [line["step"] for line in reports] == sorted(due)
    assert all(line["train/grad_norm"] > 0 for line in reports)
    speeds = [[line[f"train_by_rank/images_per_s_rank{rank}"] for rank in range(ranks)] for line in reports]
    assert [sum(one) for one in speeds] == pytest.approx([line["train/images_per_s"] for line in reports])
    assert all(speed > 0 for one in speeds for speed in one)
    assert [line["step"] for line in lines] == ends
    assert lines[-1]["eval/accuracy"] == result["eval_accuracy"]
    losses = [line["train/loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    ranks_left = [json.loads((folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert [one["rank"] for one in ranks_left] == list(range(ranks))
    assert len({one["weights_sha256"] for one in ranks_left}) == 1
    resident = [one["memory"]["resident_mib"] for one in ranks_left]
    assert min(resident) > 100  # torch alone
    assert result["memory"] == {"resident_mib": max(resident), "resident_rank": resident.index(max(resident))}
    assert len(json.loads((folder / "placement.json").read_text())["ranks"]) == ranks
    assert json.loads((folder / "config.json").read_text())["model"] == "efficientnet_tiny"
    events = EventAccumulator(str(folder)).Reload()
    assert [one.step for one in events.Scalars("eval/accuracy")] == [line["step"] for line in lines]
    assert [one.step for one in events.Scalars("train/loss")] == [line["step"] for line in reports]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.slow
def test_eight_ranks_by_the_command_of_the_readme(run, tmp_path):
    words = [*QUICK, "--batch-size-per-rank", "60", "--run", "r"]
    done = run("horovodrun", 8, ["-m", "hvdtrain.effnet", *words], MPIEXEC_TIMEOUT="240")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["np"], result["global_batch"], result["steps"]) == (8, 480, 3)
    assert result["exit_reason"] == "finished"
    assert 0 < result["eval_accuracy"] < 1
    assert math.isfinite(result["eval_loss"])
    ranks_left = [json.loads((folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(8)]
    assert len({one["pid"] for one in ranks_left}) == 8
    assert len({one["weights_sha256"] for one in ranks_left}) == 1


def test_options_that_change_the_step_work_together(run, tmp_path):
    options = ["--precision", "bf16", "--compression", "fp16", "--accumulate-steps", "3", "--clip-value", "0.5"]
    options += ["--clip-norm", "1", "--fusion-threshold-mb", "8", "--cycle-time-ms", "2", "--cutout", "8"]
    options += [
        "--reducer",
        "horovod",
        "--fusion-groups",
        "4",
        "--check-replicas-every",
        "2",
        "--max-skipped-steps",
        "5",
    ]
    quick = [*QUICK, "--run", "r", "--optimizer", "rmsprop", "--dropout", "0"]
    done = run("mpirun", 2, [*EFFNET, *quick, "--images=768", *options])
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["global_batch"], result["steps"]) == (64 * 2 * 3, 768 // 384)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["mpi"].startswith("Open MPI v")
    settings = environment["horovod_settings"]
    assert settings["HOROVOD_FUSION_THRESHOLD"] == str(8 * 2**20)
    assert settings["HOROVOD_CYCLE_TIME"] == "2.0"
    hashes = {json.loads((folder / "ranks" / f"rank-{rank}.json").read_text())["weights_sha256"] for rank in (0, 1)}
    assert len(hashes) == 1


@pytest.mark.slow
@pytest.mark.long  # a C++ compiler works for minutes
@pytest.mark.timeout(600)
def test_a_compiled_model_trains_alike_on_two_ranks(run, tmp_path):
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r", "--compile"], MPIEXEC_TIMEOUT="500")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    assert json.loads((folder / "result.json").read_text())["exit_reason"] == "finished"
    hashes = {json.loads((folder / "ranks" / f"rank-{rank}.json").read_text())["weights_sha256"] for rank in (0, 1)}
    assert len(hashes) == 1


NO_PROCESS = """\
import sys

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")


def refuse(event, arguments):
    if event in STARTS:
        raise RuntimeError(f"{event} {arguments}")


sys.addaudithook(refuse)
"""


def test_one_process_needs_no_mpi_and_starts_no_other(run, tmp_path):
    hidden = tmp_path / "hidden"
    for package in ("mpi4py", "horovod"):
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text("raise ImportError('hidden')\n")
    (hidden / "sitecustomize.py").write_text(NO_PROCESS)
    done = run("python", 1, [*EFFNET, *QUICK, "--images=256", "--run", "r"], PYTHONPATH=f"{hidden}:{PROJECT}")
    assert done.returncode == 0, done.stderr
    environment = json.loads((tmp_path / "runs" / "effnet" / "r" / "environment.json").read_text())
    assert environment["platform"] == platform.platform()
    if (PROJECT / ".git").exists() and "HVDTRAIN_COMMIT" not in os.environ:
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True)
        assert environment["commit"] == said.stdout.strip()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch-size-per-rank", "800"], ["800", "719", "2 ranks"]),
        slow(["--precision", "fp16"], ["fp16", "bf16"]),
        slow(["--data", "imagefolder", "--data-dir", "nowhere"], ["nowhere"]),
        slow(["--pretrained", "missing.pth"], ["missing.pth"]),
        (["--runs-dir", "file/below"], ["file/below"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line_and_status_2(run, tmp_path, words, named):
    (tmp_path / "file").write_text("")
    done = run("mpirun", 2, [*EFFNET, *QUICK, *words])
    assert done.returncode == 2, done.stdout + done.stderr
    line = only_line(done)
    assert all(word in line for word in named), line
    assert not (tmp_path / "runs").exists()


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


@pytest.mark.parametrize(
    ("launcher", "words", "named"),
    [
        ("mpirun", ["--model", "resnet50"], ["resnet50", "efficientnet_b0"]),
        ("horovodrun", ["--recipe", "soup"], ["soup"]),
        slow("mpirun", ["--nonsense", "1"], ["--nonsense"]),
        slow("mpirun", ["--stages", "3", "--accumulate-steps", "3"], ["--stages 3", "2 ranks cannot be"]),
        slow("mpirun", ["--sync", "two-level"], ["--sync", "all 2 ranks are on"]),
        slow("mpirun", ["--elastic"], ["--elastic needs an MPI"]),
    ],
)
def test_settings_are_refused_before_torch_is_imported(run, no_torch, launcher, words, named):
    done = run(launcher, 2, [*EFFNET, *QUICK, *words], **no_torch)
    assert done.returncode == 2, done.stdout + done.stderr
    line = only_line(done)
    assert all(word in line for word in named), line


@pytest.mark.slow
def test_more_ranks_than_images(run, tmp_path):
    for label in ("a", "b"):
        (tmp_path / "d" / label).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "d" / label / "one.png")
    done = run("mpirun", 3, [*EFFNET, *QUICK, "--data", "imagefolder", "--data-dir", "d"])
    assert done.returncode == 2
    line = only_line(done)
    assert "2 training" in line
    assert "3 ranks" in line


@pytest.mark.slow
def test_the_model_does_not_notice_how_many_ranks_share_a_global_batch(tmp_path):
    losses = []
    for launcher, ranks in (("python", 1), ("mpirun", 2)):
        quiet = ["--sync-bn", "--dropout", "0", "--stochastic-depth", "0", "--global-batch-size", "64"]
        words = [word for word in QUICK if word not in ("--batch-size-per-rank", "64")]
        end_well(tmp_path, launcher, ranks, [*EFFNET, *words, *quiet, "--run", launcher])
        lines = (tmp_path / "runs" / "effnet" / launcher / "metrics.jsonl").read_text().splitlines()
        line = json.loads(lines[-1])
        losses.append([line["train/loss"], line["eval/loss"]])
    # sums in another order, over 23 steps; at another seed the losses differ by more than 0.01
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        slow(["--global-batch-size", "33"], ["33", "2 ranks", "32"]),
        (["--global-batch-size", "2", "--sync-bn"], ["--sync-bn", "at least 2"]),
    ],
)
def test_a_global_batch_that_the_ranks_cannot_share(run, words, named):
    quick = [word for word in QUICK if word not in ("--batch-size-per-rank", "64")]
    done = run("mpirun", 2, [*EFFNET, *quick, *words])
    assert done.returncode == 2, done.stdout + done.stderr
    line = only_line(done)
    assert all(word in line for word in named), line


def mpmd(run, tmp_path, first, second, **environment):
    """Two ranks with a command line each, through mpirun's colon."""
    script = tmp_path / "second.py"
    script.write_text(f"import runpy, sys\n{second}\nrunpy.run_module('hvdtrain.effnet', run_name='__main__')\n")
    words = ["-m", "hvdtrain.effnet", *first, ":", "-np", "1", "python", str(script), *first]
    return run("mpirun", 1, words, **environment)


def test_ranks_that_disagree_on_a_setting_are_told_both_values(run, tmp_path, no_torch):
    done = mpmd(run, tmp_path, QUICK, "sys.argv += ['--epochs', '3']", **no_torch)
    assert done.returncode == 2, done.stdout + done.stderr
    line = only_line(done)
    assert "--epochs" in line
    assert "'1'" in line
    assert "'3'" in line


@pytest.mark.slow
def test_ranks_that_disagree_on_the_code_are_told(run, tmp_path, no_torch):
    shutil.copytree(Path(hvdtrain.__file__).parent, tmp_path / "other" / "hvdtrain")
    with (tmp_path / "other" / "hvdtrain" / "effnet.py").open("a") as file:
        file.write("# changed\n")
    done = mpmd(run, tmp_path, QUICK, f"sys.path.insert(0, {str(tmp_path / 'other')!r})", **no_torch)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "code" in only_line(done)


@pytest.mark.slow
def test_ranks_that_disagree_on_the_steps_are_told(run, tmp_path):
    for where, images in (("one", 10), ("two", 20)):
        for label in ("a", "b"):
            (tmp_path / where / "d" / label).mkdir(parents=True)
            for number in range(images):
                Image.new("RGB", (32, 32)).save(tmp_path / where / "d" / label / f"{number}.png")
    words = [*QUICK, "--data", "imagefolder", "--data-dir", "d", "--batch-size-per-rank", "2"]
    script = program_of(
        tmp_path,
        "import os, runpy\n"
        f"os.chdir({str(tmp_path)!r} + ('/one' if os.environ['OMPI_COMM_WORLD_RANK'] == '0' else '/two'))\n"
        "runpy.run_module('hvdtrain.effnet', run_name='__main__')\n",
    )
    done = run("mpirun", 2, [script, *words])
    assert done.returncode == 2, done.stdout + done.stderr
    line = only_line(done)
    assert "16" in line
    assert "32" in line


def test_a_finished_run_is_not_overwritten_unless_asked(run, tmp_path):
    words = [*EFFNET, *QUICK, "--images=256", "--run", "r"]
    result = tmp_path / "runs" / "effnet" / "r" / "result.json"
    end_well(tmp_path, "python", 1, words)
    first = result.read_bytes()
    refused = run("mpirun", 2, words)
    assert refused.returncode == 2
    assert "--overwrite" in only_line(refused)
    assert result.read_bytes() == first
    end_well(tmp_path, "mpirun", 2, [*words, "--overwrite"])
    assert json.loads(result.read_text())["np"] == 2


@pytest.mark.parametrize("launcher", ["python", "mpirun", slow("horovodrun")])
def test_ctrl_c_ends_all_ranks_and_leaves_a_readable_run_folder(started, tmp_path, launcher):
    ranks = 1 if launcher == "python" else 2
    job = started(launcher, ranks, [*EFFNET, *LONG])
    folder = tmp_path / "runs" / "effnet" / "r"
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, TIMEOUT_S)
    pids = rank_pids(folder)
    assert len(pids) == ranks
    os.killpg(job.pid, signal.SIGINT)  # what a terminal does
    job.wait(timeout=10)
    wait_until(lambda: not left_in(tmp_path), 5)
    result = json.loads((folder / "result.json").read_text())
    if launcher == "python":  # nobody hurries it: it saves
        assert (job.returncode, result["exit_reason"]) == (0, "preempted")
    else:
        assert job.returncode != 0
        assert result["exit_reason"] in ("interrupted", "terminated")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert result["steps"] == lines[-1]["step"]
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(started, tmp_path):
    job = started("mpirun", 2, [*EFFNET, *LONG])
    folder = tmp_path / "runs" / "effnet" / "r"
    wait_until((folder / "metrics.jsonl").exists, TIMEOUT_S)
    pids = wait_until(lambda: (found := rank_pids(folder)) and len(found) == 2 and found, 10)
    os.kill(pids[1], signal.SIGKILL)
    job.wait(timeout=10)
    assert job.returncode == 128 + signal.SIGKILL
    wait_until(lambda: not left_in(tmp_path), 5)
    assert json.loads((folder / "result.json").read_text())["exit_reason"] in ("terminated", "failed")


@pytest.mark.slow
def test_a_failing_rank_leaves_its_last_words_and_ends_the_job(run, tmp_path):
    done = run("mpirun", 2, [*EFFNET, *QUICK, "--run", "r"], HVDTRAIN_FAULT="raise@rank1:step3")
    assert done.returncode == 1, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    first, *trace = (folder / "ranks" / "rank-1.err").read_text().splitlines()
    host = socket.gethostname()
    told = "RuntimeError: injected fault raise@rank1:step3"
    assert first == f"hvdtrain: error: rank 1 on {host} failed at step 3: {told}"
    assert trace[-1] == told
    wait_until(lambda: not left_in(tmp_path), 5)
    assert json.loads((folder / "result.json").read_text())["exit_reason"] in ("terminated", "failed")


@pytest.mark.slow
def test_an_image_that_cannot_be_decoded_is_left_out_and_counted(run, tmp_path):
    """Its header is whole, its pixels are not: only decoding it shows."""
    one_torn_image(tmp_path / "d")
    words = [*EFFNET, *QUICK, "--data", "imagefolder", "--data-dir", "d", "--batch-size-per-rank", "4", "--epochs", "2"]
    words += ["--workers", "0"]
    done = run("mpirun", 2, [*words, "--run", "r"])
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "runs" / "effnet" / "r" / "result.json").read_text())
    assert (result["unreadable_images"], result["steps"], result["skipped_steps"]) == (2, 8, 0)
    assert str(Path("d") / "b" / "7.png") in done.stderr
    done = run("mpirun", 2, [*words, "--run", "s", "--max-unreadable-images", "0"])
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ") and "warning" not in line]
    assert "1 images could not be decoded" in line
    assert "more than the 0 that" in line
