"""A whole training of one rank, without the handlers of its process."""

import argparse
import io
import json
import shutil
import sys
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import partial
from itertools import islice
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import hvdtrain
from hvdtrain.program.own_log import to_png
from hvdtrain.program.run import Run
from hvdtrain.program.start import run_to_end
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.errors import Preempted
from hvdtrain.settings.safety.exits import BadInput, EndOfRun
from tests.refusals import ended

SAMPLES = torch.arange(20.0)[:, None]


def run_in(folder, stack, **changes):
    settings = hvdtrain.Settings(
        runs_dir=folder, experiment="e", run="r", report_every_steps=1, hang_timeout_s=0.0, **changes
    )
    return Run(SerialComm(), settings, stack)


def visited(folder, *, steps, factor=1.0, **changes):
    """The samples of an epoch that a run visits in so many steps, or to its end; its losses are times `factor`."""
    seen = []

    def losses(model, batch):
        if torch.is_grad_enabled():
            seen.extend(batch["inputs"].flatten().tolist())
        return model(batch["inputs"]).square().mean(1) * factor

    with ExitStack() as stack:
        run = run_in(folder, stack, epochs=1, **changes)
        training = run.training(lambda: nn.Linear(1, 1), losses, SAMPLES, SAMPLES[:2])
        seen.clear()  # an epoch on CPUs has been timed
        for _ in islice(training, steps):
            pass
    return seen


class Squares(hvdtrain.Task):
    best, higher_is_better = "closeness", True

    def loss(self, model, batch, *, training):
        errors = model(batch["inputs"]).square().mean(1)
        return hvdtrain.Sums(
            loss=errors.sum(), count=errors.new_full((), len(errors)), more={"near": (errors < 9).sum()}
        )

    def metrics(self, totals):  # no word about what is not there yet
        return {**super().metrics(totals), "closeness": (1 + totals["near"]) / totals["count"]}


@pytest.fixture(autouse=True)
def without_handlers(monkeypatch):
    monkeypatch.setattr("hvdtrain.settings.safety.exits.install_stop_handlers", lambda *_, **__: Event())


@pytest.mark.parametrize(
    ("steps", "factor", "reason", "message"),
    [
        (0, 1.0, "not trained", "ended without a loop over run.training"),
        (None, torch.nan, "all steps skipped", "all 2 steps were skipped, so the model has learned nothing"),
    ],
)
def test_a_run_that_learns_nothing_fails(tmp_path, steps, factor, reason, message):
    attempt = partial(visited, tmp_path, steps=steps, factor=factor, batch_size_per_rank=10)
    assert ended(attempt, message) == (1, reason)
    assert json.loads((tmp_path / "e" / "r" / "result.json").read_text())["exit_reason"] == reason


def trained(folder, body, *, epochs=3, end=None, own=None, **changes):
    """A training of 5 steps an epoch, with a report for each, that calls `body` with each item; its result."""
    with ExitStack() as stack:
        run = run_in(folder, stack, epochs=epochs, batch_size_per_rank=4, **changes)
        training = run.training(lambda: nn.Linear(1, 1), Squares(), SAMPLES, SAMPLES[:2], at_end=end, **own or {})
        for item in training:
            if body(training, item):
                break
    training.require_end()
    return json.loads((training.folder / "result.json").read_text())


def lines_of(folder):
    return [json.loads(line) for line in (folder / "e/r/metrics.jsonl").read_text().splitlines()]


def with_groups(model):
    return torch.optim.AdamW([{"params": [model.weight], "lr": 0.01}, {"params": [model.bias]}], lr=0.04)


def test_an_optimizer_and_a_schedule_of_a_program(tmp_path):
    rates = []

    def body(training, item):
        rates.append([group["lr"] for group in training.step.optimizer.param_groups])

    trained(tmp_path, body, epochs=1, own={"optimizer": with_groups, "schedule": lambda progress: 1 - progress})
    assert rates[:5] == [pytest.approx([share * 0.01, share * 0.04]) for share in (1.0, 0.8, 0.6, 0.4, 0.2)]
    assert [one["train/lr"] for one in lines_of(tmp_path)][:5] == pytest.approx([0.04, 0.032, 0.024, 0.016, 0.008])
    assert json.loads((tmp_path / "e/r/config.json").read_text())["derived"]["optimizer"] == "AdamW"


def test_a_rate_of_the_command_line_beside_an_own_optimizer_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"--lr 0.1: the program's own optimizer has its rates. Leave it out."):
        trained(tmp_path, print, own={"optimizer": with_groups}, lr=0.1)
    assert not (tmp_path / "e").exists()


def test_an_option_that_cannot_be_saved_is_refused_before_there_is_a_run(tmp_path):
    def made(model):
        return torch.optim.AdamW(model.parameters(), weight_decay=np.float64(0.1))

    with pytest.raises(BadInput, match=r"optimizer AdamW: .*numpy.*Pass numbers of Python"):
        trained(tmp_path, print, own={"optimizer": made})
    assert not (tmp_path / "e").exists()


def stop_at(step, *, breaks=False):
    def body(training, item):
        if item.step == step and type(item) is hvdtrain.Report:
            training.stop("it is  good\nenough")
            return breaks
        return False

    return body


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(("step", "epochs"), [(7, 2), (10, 2), (2, 1)])
def test_a_program_finishes_early_with_a_test_of_the_last_weights(tmp_path, capsys, step, epochs, breaks):
    result = trained(tmp_path, stop_at(step, breaks=breaks))
    assert (result["exit_reason"], result["stopped"]) == ("finished", "it is good enough")
    assert (result["steps"], result["epochs"]) == (step, epochs)
    assert result["eval_closeness"] is not None
    last = lines_of(tmp_path)[-1]
    assert (last["step"], last["epoch"]) == (step, epochs)
    assert f"finishing after step {step}: it is good enough" in capsys.readouterr().out
    [saved] = (tmp_path / "e/r/checkpoints").glob("step-*")
    assert saved.name == f"step-{step:09d}"


def test_a_run_that_goes_back_to_a_step_trains_on_after_it(tmp_path):
    trained(tmp_path / "first", stop_at(7))
    shutil.copytree(tmp_path / "first", tmp_path / "rest")  # this process keeps the first one's lock
    result = trained(tmp_path / "rest", lambda *_: False, resume_from=7)
    assert (result["exit_reason"], result["stopped"]) == ("finished", None)
    assert result["steps"] > 7


def patient(training, item):
    """What a program does that counts, and records, each item of its loop."""
    state = training.state
    state["items"] = state.get("items", 0) + 1
    state.setdefault("history", []).append((item.step, torch.tensor(item.step)))
    training.log("own/items", state["items"])
    if isinstance(item, hvdtrain.Report):
        training.log_image("own/square", torch.full((4, 6), 0.5))


def test_a_resumed_run_has_its_state_back_and_records_nothing_twice(tmp_path):
    trained(tmp_path / "whole", patient)

    def interrupted(training, item):
        patient(training, item)
        return item.step == 7

    with pytest.raises(Preempted, match="saved at step 7"):
        trained(tmp_path / "first", interrupted)
    shutil.copytree(tmp_path / "first", tmp_path / "rest")  # this process keeps the first one's lock
    with (tmp_path / "rest/e/r/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "own/items": 1000}\n')  # written after the checkpoint
    at_first = []

    def resumed(training, item):
        at_first.append(deepcopy(training.state))
        patient(training, item)

    trained(tmp_path / "rest", resumed)
    assert at_first[0]["items"] == 8  # 7 reports and an epoch
    assert [(step, int(number)) for step, number in at_first[0]["history"]][-2:] == [(6, 6), (7, 7)]
    logged = [[(one["step"], one["own/items"]) for one in lines_of(folder) if "own/items" in one]
              for folder in (tmp_path / "whole", tmp_path / "rest")]  # fmt: skip
    assert logged[0] == logged[1]
    assert [step for step, _ in logged[0]] == list(range(1, 16))  # an epoch's last report has its value
    board = EventAccumulator(str(tmp_path / "rest/e/r")).Reload()
    assert [(one.step, one.value) for one in board.Scalars("own/items")] == logged[0]
    images = [one["step"] for one in lines_of(tmp_path / "rest") if one.get("event") == "image"]
    assert images == list(range(1, 16))
    assert {one.step for one in board.Images("own/square")} <= set(images)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda training: training.state.update(model=nn.Linear(1, 1)), r"state\['model'\] is a torch.nn.*Linear"),
        (
            lambda training: training.state.update(a=[{"b": np.float64(1)}]),
            r"state\['a'\]\[0\]\['b'\] is a numpy.float64",
        ),
        (lambda training: training.log("train/x", 1), r"log 'train/x': hvdtrain has curves of this name"),
        (lambda training: training.log("x", "1"), r"log 'x': a str is not a number"),
        (lambda training: training.log("x", torch.ones(2)), r"log 'x': a Tensor that is not one number"),
        (lambda training: training.log_image("x", torch.ones(5, 5, 5)), r"log_image 'x': \(5, 5, 5\) is not a picture"),
        (lambda training: training.log_image("x", torch.ones(5, 5).long()), r"log_image 'x': int64 pixels"),
        (lambda training: training.log_image("x", Image.new("CMYK", (1, 1))), r"log_image 'x': cannot write mode CMYK"),
    ],
)
def test_what_cannot_be_kept_ends_the_run_with_one_line(tmp_path, call, line):
    with pytest.raises(EndOfRun, match=line) as end:
        trained(tmp_path, lambda training, _: call(training) and False)
    assert end.value.status == 2
    assert "\n" not in str(end.value)
    assert json.loads((tmp_path / "e/r/result.json").read_text())["exit_reason"] == "failed"


def test_a_name_has_one_value_for_each_step_and_none_after_the_end(tmp_path, capsys):
    kept = []

    def body(training, item):
        kept.append(training)
        training.log("own/x", item.step)

    trained(tmp_path, body, epochs=1, end=lambda training: training.log("own/end", 1))
    kept[0].log("own/x", 1)
    said = capsys.readouterr().out
    assert "training.log 'own/x': step 5 has a value already" in said
    assert "training.log 'own/x': the run has ended" in said
    assert [one["own/x"] for one in lines_of(tmp_path) if "own/x" in one] == [1, 2, 3, 4, 5]
    assert [one["step"] for one in lines_of(tmp_path) if "own/end" in one] == [5]


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(3, 4, 6),
        torch.rand(1, 4, 6).bfloat16(),
        torch.rand(4, 6) > 0.5,
        np.zeros((4, 6, 3), np.uint8),
        Image.new("RGB", (6, 4)),
        Figure(figsize=(1, 1)),
    ],
)
def test_pictures_of_any_kind_become_png(image):
    picture = Image.open(io.BytesIO(to_png(image)))
    assert picture.format == "PNG"
    assert isinstance(image, Figure) or picture.size == (6, 4)


def test_a_run_that_resumes_with_another_batch_visits_what_is_left_once(tmp_path):
    first = visited(tmp_path / "first", steps=3, batch_size_per_rank=4)
    shutil.copytree(tmp_path / "first", tmp_path / "rest")  # this process keeps the first one's lock
    rest = visited(tmp_path / "rest", steps=None, batch_size_per_rank=5)
    assert (len(first), len(rest)) == (12, 8)
    assert sorted(first + rest) == SAMPLES.flatten().tolist()


def end_of(folder, body, losses=lambda model, batch: model(batch["inputs"]).square().mean(1)):
    """What a program with this body raises at its end, and the exit reason of its run."""

    def main(run):
        body(run.training(lambda: nn.Linear(1, 1), losses, SAMPLES, SAMPLES[:2]))

    error = None
    try:
        with ExitStack() as stack:
            run_to_end(main, run_in(folder, stack, batch_size_per_rank=1, epochs=2))
    except (Exception, SystemExit) as raised:  # noqa: BLE001
        error = raised
    result = folder / "e" / "r" / "result.json"
    return error, json.loads(result.read_text())["exit_reason"] if result.exists() else None


def test_a_program_with_a_parser_of_its_own_learns_where_its_options_belong():
    def main(_):
        argparse.ArgumentParser().parse_args(["--epochs", "3"])

    with pytest.raises(BadInput, match="a subclass of hvdtrain"):
        run_to_end(main, SimpleNamespace(started=None))
    with pytest.raises(SystemExit):
        run_to_end(lambda _: sys.exit(2), SimpleNamespace(started=None))


def swallow(training):
    with suppress(Exception):
        for _ in training:
            pass


def leave(training):
    for _ in training:
        break


def leave_by(code):
    def body(training):
        for _ in training:
            sys.exit(code)

    return body


def twice(training):
    assert [sum(1 for _ in training), sum(1 for _ in training)] == [21, 0]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (leave, 0, "preempted"),
        (leave_by(0), 0, "preempted"),
        (leave_by(7), 7, "failed"),
        (twice, None, "finished"),
    ],
)
def test_a_loop_that_is_left_is_saved_and_resumes(tmp_path, body, status, reason):
    error, found = end_of(tmp_path, body)
    assert (getattr(error, "status", getattr(error, "code", None)), found) == (status, reason)
    assert any((tmp_path / "e" / "r" / "checkpoints").glob("step-*"))


def test_a_program_that_catches_everything_keeps_the_status_of_its_training(tmp_path):
    error, reason = end_of(tmp_path, swallow, lambda model, batch: model(batch["inputs"]).mean(1) * float("nan"))
    assert isinstance(error, EndOfRun)
    assert (error.status, reason) == (3, "too many skipped steps")


def test_a_program_that_catches_an_error_of_a_step_fails(tmp_path):
    def body(training):
        def fail(*_):
            raise RuntimeError("a step")

        training.step.model.register_forward_pre_hook(fail)
        swallow(training)

    error, _ = end_of(tmp_path, body)
    assert str(error) == "a step"
