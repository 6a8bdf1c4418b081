"""hvdlaunch estimate: what it reads, prints and refuses."""

import csv
import json
from pathlib import Path

import pytest

from tests.unit.cli.commands import output, refusal

MEASURED = ["--measured", "8=1223", "--unit", "images/s", "--model", "efficientnet_b4", "--precision", "tf32"]
B4 = ["estimate", *MEASURED, "--batch", "64", "--machine", "dgx-a100"]
PARTS = ("compute_s", "exposed_communication_s", "negotiation_s", "stragglers_s")


def sizes(capsys, *words):
    return json.loads(output(capsys, *words, "--json"))["sizes"]


def dry_run(**changes):
    device = {"name": "a100", "memory_bytes": 80, "roofline_s": 0.2, "step_s": 0.4, "low_s": 0.3, "high_s": 0.5}
    device |= {"bound": "memory", "samples_per_s": 160.0, "fits": False, "largest_batch_per_rank": 32}
    parts = ("parameters", "gradients", "optimizer", "average", "activations")
    of_step = dict.fromkeys(("operations", "kernels", "flops", "bytes", "micro_batches"), 1)
    of_run = {"dry_run": 1, "program": "hvdtrain.effnet", "devices": [device], "cannot_see": []}
    of_run |= {"model": "efficientnet_b4", "unit": "images", "precision": "tf32", "batch_size_per_rank": 64}
    of_run |= {"parameters": 19_341_616, "gradient_tensors": 418, "gradient_bytes": 77_366_464}
    of_run["memory_bytes"] = {**dict.fromkeys(parts, 1), "total": 100_000_000_000}
    return {**of_run, **of_step, **changes}


def make_run(folder, *, ranks, speed, model="efficientnet_tiny", sync="flat", device="cpu", derived=None):
    (folder / "ranks").mkdir(parents=True)
    sums = {"gradient_bytes": 20_000_000, "gradient_tensors": 200, "fusion_threshold_mb": 8.0, "train_samples": 1438}
    sums |= {"steps": 225, "steps_per_epoch": 45}
    config = {"precision": "fp32", "accumulate_steps": 1, "sync": sync, "derived": {**sums, **(derived or {})}}
    result = {"np": ranks, "hosts": ["here"], "model": model, "global_batch": 32 * ranks, "epochs": 5}
    result |= {"train_images_per_s": speed, "checkpoint_hold_s": 0.5, "energy_wh": 10.0, "wall_time_s": 36.0}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "ranks" / "rank-0.json").write_text(json.dumps({"device": device, "device_name": device}))
    return str(folder)


def test_a_measured_speed_predicts_larger_sizes_in_parts_with_a_range(capsys):
    words = ("--epochs", "1", "--samples-per-epoch", "1000000")
    found = sizes(capsys, *B4, "--gpus", "16,64,2048", *words)
    assert [(size["gpus"], size["extrapolated"]) for size in found] == [(16, False), (64, False), (2048, True)]
    for size in found:
        assert size["low"] < size["samples_per_s"] < size["high"]
        assert size["samples_per_s"] == pytest.approx(size["gpus"] * 64 / size["step_s"])
        assert size["step_s"] == pytest.approx(sum(size[part] for part in PARTS))
        assert 0.8 < size["efficiency"] < 1


def test_money_time_and_failures(capsys):
    words = ["--samples-per-epoch", "1281167", "--epochs", "90", "--price-per-gpu-hour", "2.5", "--save-s", "5"]
    (size,) = sizes(capsys, *B4, "--gpus", "64", *words)
    assert size["hours"] == pytest.approx(90 * 1281167 / size["samples_per_s"] / 3600)
    assert size["cost"] == pytest.approx(2.5 * 64 * size["hours"])
    assert 0 < size["failures"]["odds"] < 1
    assert 0 < size["failures"]["goodput_restarts"] < 1


def test_a_deadline_and_a_critical_batch_decide(capsys):
    words = ["--samples-per-epoch", "1281167", "--epochs", "90"]
    text = output(capsys, *B4, "--gpus", "8,64,256", *words, "--deadline", "12h", "--critical-batch", "8192")
    assert "24 GPUs are the fewest" in text
    assert "stop at 128 GPUs" in text
    assert "stop at 125 GPUs" in output(capsys, *B4, "--gpus", "256", "--critical-batch", "imagenet")
    lines = output(capsys, *B4, "--gpus", "8", *words, "--deadline", "1min").splitlines()
    assert ["no size" in line for line in lines if "meets" in line] == [True]


def test_more_gpus_that_divide_an_optimizer_fit_a_larger_model(capsys, tmp_path):
    (tmp_path / "dry.json").write_text(json.dumps(dry_run(sharded_bytes=40_000_000_000)))
    found = sizes(capsys, "estimate", "--dry-run", "dry.json", "--machine", "dgx-a100", "--gpus", "1,8")
    assert [size["fits_memory"] for size in found] == [False, True]


def test_a_dry_run_is_extrapolated_and_says_what_makes_it_fit(capsys, tmp_path):
    (tmp_path / "dry.json").write_text(json.dumps(dry_run()))
    found = sizes(capsys, "estimate", "--dry-run", "dry.json", "--machine", "dgx-a100", "--gpus", "8,64")
    assert all(size["extrapolated"] for size in found)
    assert [(size["fits_memory"], size["stages_to_fit"]) for size in found] == [(False, 2)] * 2
    assert found[0]["high"] / found[0]["low"] > 1.4


def test_runs_predict_from_the_largest_with_their_saves_and_energy(capsys, tmp_path):
    runs = [make_run(tmp_path / f"np{ranks}", ranks=ranks, speed=100.0 * ranks) for ranks in (1, 2)]
    words = ["--gpus-per-host", "2", "--link", "1gbit", "--price-per-gpu-hour", "1"]
    (two, four) = sizes(capsys, "estimate", *runs, "--gpus", "2,4", *words)
    assert two["samples_per_s"] == pytest.approx(200)
    assert (two["extrapolated"], four["extrapolated"]) == (False, True)
    assert 200 < four["samples_per_s"] < 400
    assert two["hours"] == pytest.approx(5 * 1438 / 200 / 3600)
    assert two["energy_kwh"] == pytest.approx(0.5 * 2 * two["hours"])  # 10 Wh in 36 s of 2 ranks: 500 W each
    assert four["failures"]["daly_s"] == pytest.approx((2 * 0.5 * 3600 / 1.2e-4 / 4) ** 0.5, rel=1e-3)


def test_hours_are_those_of_the_steps_that_a_run_had(capsys, tmp_path):
    run = make_run(tmp_path / "run", ranks=2, speed=200.0, derived={"steps": 9, "max_steps": 9, "epochs": 1})
    (two,) = sizes(capsys, "estimate", run, "--gpus", "2", "--link", "1gbit")
    assert two["hours"] == pytest.approx(0.2 * 1438 / 200 / 3600)


@pytest.mark.parametrize(
    ("derived", "sent"),
    [
        ({"fusion_threshold_mb": 0.5}, "0.5 MiB, the first of 0.5 MiB"),
        ({"compression": "fp16"}, "4 MiB, the first of 0.5 MiB"),
        ({"fusion_threshold_mb": None}, "128 MiB\n"),  # --reducer horovod
        ({"fusion_threshold_mb": 0.0}, "0.0954 MiB\n"),  # --deterministic: 200 gradients, each alone
    ],
)
def test_sums_are_those_of_the_run(capsys, tmp_path, derived, sent):
    run = make_run(tmp_path / "run", ranks=2, speed=200.0, derived=derived)
    assert f"in buckets of {sent}" in output(capsys, "estimate", run, "--gpus", "2")


def test_csv_and_picture(capsys, tmp_path):
    words = ["--samples-per-epoch", "1281167", "--epochs", "90", "--hours", "1000"]
    output(capsys, *B4, "--gpus", "16,64,2048", "--csv", "out.csv", "--picture", "out.svg", *words)
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["gpus"] for row in rows] == ["16", "64", "2048"]
    assert float(rows[0]["samples_per_s"]) > 2000
    assert float(rows[0]["gpu_hours"]) == pytest.approx(16 * float(rows[0]["hours"])), "hours of the failures' job"
    picture = (tmp_path / "out.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.count("<polyline") == 4


def test_measured_sums_change_the_prediction(capsys):
    vgg = ["estimate", "--measured", "8=1000", "--model", "vgg16", "--precision", "fp32", "--batch", "32"]
    vgg += ["--machine", "dgx-a100", "--gpus", "64"]
    (slow,) = sizes(capsys, *vgg, "--allreduce", "1M=1ms,1G=100ms")
    (fast,) = sizes(capsys, *vgg)
    assert slow["all_reduce"]["s"] > 2 * fast["all_reduce"]["s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "--gpus", "8"], "nothing was measured"),
        ([*B4, "--gpus", "4"], "--gpus 4"),
        ([*B4, "--gpus", "16", "--deadline", "12"], "12h"),
        ([*B4, "--gpus", "16", "--deadline", "12h"], "--samples-per-epoch"),
        ([*B4, "--gpus", "16", "--price-per-gpu-hour", "2"], "--epochs"),
        ([*B4, "--gpus", "16", "--measured", "8"], "8=1223"),
        ([*B4, "--gpus", "16", "--overlap", "2"], "share"),
        ([*B4, "--gpus", "16", "--critical-batch", "mnist"], "'mnist'"),
        ([*B4, "--gpus", "16", "--model", "own"], "--dry-run"),
        ([*B4, "--gpus", "16", "--dry-run", "x.json"], "do not go together"),
        (["estimate", "--measured", "8=1223", "--gpus", "16"], "--model, --batch, --precision"),
        (["estimate", *MEASURED, "--batch", "64", "--gpus", "16"], "--link"),
        (["estimate", "foreign", "--gpus", "16"], "np is missing, not a whole number"),
        (["estimate", "one", "other", "--gpus", "16"], "different trainings (model"),
        (["estimate", "one", "gpu", "--gpus", "16"], "on cpu and on Tesla V100"),
        (["estimate", "gpu", "--gpus", "16", "--machine", "dgx-a100"], "these runs were on Tesla V100"),
        (["plan", "--save-s", "3", "--", "true"], "--hours"),
        (["estimate", "local", "--gpus", "16"], "--sync local"),
        (["estimate", "one", "--gpus", "16", "--machine", "dgx-a100"], "these runs were on CPUs"),
        (["estimate", "--dry-run", "dry.json", "--gpus", "8"], "--machine"),
        (["estimate", "--dry-run", "dry.json", "--machine", "p5", "--gpus", "8"], "a100"),
        (["estimate", "--dry-run", "foreign/config.json", "--machine", "p5", "--gpus", "8"], "not of a dry run"),
        (["estimate", "--dry-run", "zero.json", "--machine", "dgx-a100", "--gpus", "8"], "gradient_bytes is 0"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, tmp_path, words, said):
    make_run(tmp_path / "one", ranks=2, speed=100.0)
    make_run(tmp_path / "other", ranks=4, speed=100.0, model="efficientnet_b0")
    make_run(tmp_path / "gpu", ranks=4, speed=100.0, device="Tesla V100")
    make_run(tmp_path / "local", ranks=4, speed=100.0, sync="local")
    make_run(tmp_path / "foreign", ranks=4, speed=100.0)
    (tmp_path / "foreign" / "result.json").write_text('{"train_images_per_s": 1}')
    (tmp_path / "dry.json").write_text(json.dumps(dry_run()))
    (tmp_path / "zero.json").write_text(json.dumps(dry_run(gradient_bytes=0)))
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("result.json", "np", "1e999"),
        ("result.json", "np", "0"),
        ("result.json", "checkpoint_hold_s", "-1"),
        ("result.json", "checkpoint_hold_s", "1e308"),
        ("config.json", "accumulate_steps", "0"),
        ("config.json", "derived.gradient_bytes", "-5"),
        ("config.json", "derived.fusion_threshold_mb", '"8"'),
    ],
)
def test_a_run_with_a_number_that_no_training_has_is_one_line_with_its_key(capsys, tmp_path, file, key, value):
    path = Path(make_run(tmp_path / "one", ranks=2, speed=100.0)) / file
    document = json.loads(path.read_text())
    *outer, name = key.split(".")
    (document[outer[0]] if outer else document)[name] = "MUTATED"
    path.write_text(json.dumps(document).replace('"MUTATED"', value))
    line = refusal(capsys, "estimate", "one", "--gpus", "16")
    assert "is not a number that JSON can hold" in line or key in line


def test_plan_prints_three_lines_of_failures(capsys):
    words = ["plan", "-np", "2", "--topology", "cpu.json", "--gpus", "none", "--hours", "1000", "--save-s", "3"]
    lines = output(capsys, *words, "--", "true").splitlines()[-3:]
    assert "interrupted" in lines[0]
    assert "one every" in lines[1]
    assert "goodput" in lines[2]
