"""hvdtrain.trainer without transformers: its command line, its remedies and its windows."""

import json
import math
from types import SimpleNamespace

import pytest

from hvdtrain import trainer
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.trainer import TunerWindows, parse, remedies_of
from launch.advice.tune.remedies import parse as parse_remedies
from launch.advice.tune.windows import read_windows

PLAIN = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "random",
    "dataloader_pin_memory": True,
    **dict.fromkeys(["bf16", "fp16", "torch_compile", "use_cpu", "activation_checkpointing"], False),
    **dict.fromkeys(["tf32", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_bucket_cap_mb"]),
    "dataloader_num_workers": 0,
}


def remedies(*, gpu=None, is_indexed=True, **changed):
    found = [*remedies_of(SimpleNamespace(**{**PLAIN, **changed}), gpu=gpu, is_indexed=is_indexed)]
    return {one.name: one.same_training for one in parse_remedies({"remedies": found}).remedies}


def test_the_words_of_the_trainer_are_taken_out_of_the_script_s(tmp_path):
    script = str(tmp_path / "run.py")
    with pytest.raises(BadInput, match=r"run\.py: not a file"):
        parse([script])
    (tmp_path / "run.py").touch()
    call = parse([script, "--lr", "1", "--trainer.bf16", "true", "out", "--trainer.optim", "sgd", "--remedies"])
    assert (str(call.script), call.arguments, call.lists_remedies) == (script, ["--lr", "1", "out"], True)
    assert call.fields == {"bf16": True, "optim": "sgd"}
    for words in ([], [script, "--trainer.bf16"]):
        with pytest.raises(BadInput, match=r"missing"):
            parse(words)


@pytest.mark.parametrize(
    ("changed", "name", "same_training"),
    [
        ({}, "--trainer.bf16 true --trainer.use_cpu true", True),
        ({"use_cpu": True}, "--trainer.bf16 true", True),
        ({"gpu": "bf16"}, "--trainer.tf32 true", True),
        ({"gpu": "fp16"}, "--trainer.fp16 true", True),
        (
            {"gradient_accumulation_steps": 4},
            "--trainer.per_device_train_batch_size 32 --trainer.gradient_accumulation_steps 1",
            True,
        ),
        ({"gradient_accumulation_steps": 2}, "--trainer.gradient_accumulation_steps 8", False),
        ({"optim": "adamw_torch"}, "--trainer.optim adamw_torch_fused", True),
        ({"activation_checkpointing": True}, "--trainer.activation_checkpointing false", True),
        ({"gpu": "bf16", "dataloader_pin_memory": False}, "--trainer.dataloader_pin_memory true", True),
        ({}, "--trainer.per_device_train_batch_size 32", False),
        ({}, "--trainer.train_sampling_strategy group_by_length", False),
    ],
)
def test_a_remedy_keeps_the_training_if_it_says_so(changed, name, same_training):
    assert remedies(**changed)[name] == same_training


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"bf16": True}, "bf16"),
        ({"gpu": "bf16"}, "fp16"),
        ({"gpu": "fp16"}, "tf32"),
        ({"gpu": "fp16"}, "bf16"),
        ({"is_indexed": False}, "train_sampling_strategy"),
        ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters"),
        ({}, "activation_checkpointing"),
    ],
)
def test_what_changes_nothing_or_cannot_work_is_no_remedy(changed, field):
    assert not [name for name in remedies(**changed) if f"--trainer.{field} " in name]


def test_a_window_has_whole_steps_of_all_ranks_and_the_losses_of_the_first_training(tmp_path, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now.s))
    windows = TunerWindows(file=tmp_path / "windows", least_steps=2, epoch_samples=None, ranks=2)
    losses = iter([1.0, 2.0, 3.0, math.inf, *range(100)])
    for _ in range(2):
        windows.begin_train()
        for _ in range(5):
            windows.begin_step()
            for _ in range(2):  # micro-batches
                windows.add(8, next(losses))
            now.s += 0.3
        now.s += 100  # an evaluation
    lines = [json.loads(line) for line in (tmp_path / "windows").read_text().splitlines()]
    assert [(line["samples"], line["seconds"]) for line in lines] == [(64, pytest.approx(0.6))] * 4
    assert [line.get("losses") for line in lines] == [[3.0, 1e15], [1.0, 5.0], None, None]
    assert len(read_windows(tmp_path / "windows").losses) == 4
