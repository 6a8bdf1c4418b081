"""Differences between a resumed run and its checkpoint: rejected, or reported in one line each."""

import json
from collections.abc import Mapping
from typing import Any

from hvdtrain.recipe.settings import OPTIMIZERS
from hvdtrain.settings import command_line
from hvdtrain.settings.notes import NEUTRAL, SHAPES, marked
from hvdtrain.settings.safety.exits import BadInput

OWN_STEPS = "own_max_steps"  # in the config of a run whose program sets its length in steps
_REMEDY = "choose another --run, or remove the run folder to start from scratch"


def describe_run(settings: Mapping[str, Any], **facts: str | int | None) -> dict[str, Any]:
    """Describe the run for a manifest: its settings as JSON, and its facts.

    They are the ranks `np`, the samples per step `global_batch`, the number of training `samples` and their `unit`,
    and if known the SHA-256 of all data `content`, and of some training and test samples `data`.
    """
    return {**facts, "config": json.loads(json.dumps(dict(settings), default=str))}


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any], settings: type) -> list[str]:
    """Return one line for each difference from the checkpoint; BadInput if a difference is not allowed.

    `saved` is the checkpoint's `metadata` with its position, `current` is this run's. The class of the `settings` marks
    those that give the checkpoint's tensors their meaning, and those that do not affect the computation.
    """
    gone = saved["config"].keys() - current["config"].keys()
    replaced = {name for name in gone if command_line.option(name) in command_line.REPLACED}
    neutral = replaced.union(marked(settings, NEUTRAL), {OWN_STEPS})
    unit = current["unit"]
    if saved["samples"] != current["samples"]:
        raise BadInput(
            f"training {unit}: the checkpoint of this run is for {saved['samples']}, now there are "
            f"{current['samples']}. Use the same data, {_REMEDY}."
        )
    if saved.get("content") != current.get("content"):
        raise BadInput(
            f"training {unit}: not those that the checkpoint of this run is for. Use the same data, {_REMEDY}."
        )
    hashes = {saved.get("data"), current.get("data")}
    if None not in hashes and len(hashes) > 1:
        raise BadInput(
            f"training or test {unit}: some are not those that the checkpoint of this run is for. Use the same data "
            f"and --seed {saved['config'].get('seed')}, {_REMEDY}."
        )
    if current["config"].get("max_steps") and saved["global_batch"] != current["global_batch"]:
        raise BadInput(
            f"--max-steps: the checkpoint of this run has {saved['global_batch']} {unit} per step, now there are "
            f"{current['global_batch']}. Pass --global-batch-size {saved['global_batch']}, {_REMEDY}."
        )
    if current["config"].get("max_steps") and saved["config"].get("max_steps") == current["config"]["max_steps"]:
        neutral |= {"epochs"}
    lines = []
    for name in sorted(saved["config"].keys() | current["config"].keys()):
        saved_value, value = saved["config"].get(name), current["config"].get(name)
        if saved_value == value or name in neutral:
            continue
        if name == "optimizer" and not {saved_value, value} <= OPTIMIZERS.keys():
            raise BadInput(f"optimizer {value}: the checkpoint of this run has {saved_value}. Use that, {_REMEDY}.")
        option = command_line.option(name)
        if name in marked(settings, SHAPES) or (name == "ema_epochs" and not (saved_value and value)):
            raise BadInput(
                f"{option} {value}: the checkpoint of this run has {saved_value}. Pass {option} {saved_value}, "
                f"{_REMEDY}."
            )
        holds = "the checkpoint's weights hold" if name == "pretrained" else "the command line's holds"
        lines.append(f"{option} was {saved_value}, now {value}: {holds}")
    epochs_begun = saved["position"]["epoch"] + (saved["position"]["visited"] > 0)
    if current["config"]["epochs"] < epochs_begun and not current["config"].get(OWN_STEPS):
        epochs = current["config"]["epochs"]
        raise BadInput(
            f"--epochs {epochs}: this run is in epoch {epochs_begun} already. Pass at least {epochs_begun}, {_REMEDY}."
        )
    if saved["np"] != current["np"]:
        kept = "global batch" if current["config"]["global_batch_size"] else "batch per rank"
        ranks = f"{current['np']} rank{'s' if current['np'] > 1 else ''} instead of {saved['np']}"
        batch = f"{current['global_batch']} {unit} per step instead of {saved['global_batch']}"
        lines.append(f"{ranks}: the {kept} is kept, {batch}; random numbers are new ones")
    return lines
