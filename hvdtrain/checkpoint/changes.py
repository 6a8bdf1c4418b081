"""What differs between a run that goes on and its checkpoint: refused, or one line each."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hvdtrain.safety.exits import BadInput

_REMEDY = "choose another --run, or remove the run folder to start from scratch"


def describe_run(
    settings: Mapping[str, Any], *, np: int, global_batch: int, samples: int, unit: str, content: str | None = None
) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run: settings, ranks, samples per step and in the training split.

    `content` is the data's SHA-256, where it is known.
    """
    plain = json.loads(json.dumps(dict(settings), default=str))
    sizes = {"np": np, "global_batch": global_batch, "samples": samples, "unit": unit, "content": content}
    return {**sizes, "config": plain}


def describe_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, shaping: Collection[str], aside: Collection[str]
) -> list[str]:
    """One line for each thing that is not the checkpoint's; BadInput for what must be.

    `saved` is the checkpoint's `about` with its position, `current` this run's `about`. With another value of a setting
    in `shaping` the checkpoint's tensors mean something else; settings in `aside` change nothing that is computed.
    """
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
    is_fixed = current["config"].get("max_steps") and not current["config"]["elastic"]  # there each loss changes it
    if is_fixed and saved["global_batch"] != current["global_batch"]:
        raise BadInput(
            f"--max-steps: the checkpoint of this run has {saved['global_batch']} {unit} per step, now there are "
            f"{current['global_batch']}. Pass --global-batch-size {saved['global_batch']}, {_REMEDY}."
        )
    if current["config"].get("max_steps") and saved["config"].get("max_steps") == current["config"]["max_steps"]:
        # As many as these steps are, with as many ranks as an elastic run has left.
        aside = [*aside, "epochs", *(["warmup_epochs"] if current["config"]["elastic"] else [])]
    lines = []
    for name in sorted(saved["config"].keys() | current["config"].keys()):
        saved_value, value = saved["config"].get(name), current["config"].get(name)
        if saved_value == value or name in aside:
            continue
        option = "--" + name.replace("_", "-")
        if name in shaping or (name == "ema_epochs" and not (saved_value and value)):
            raise BadInput(
                f"{option} {value}: the checkpoint of this run has {saved_value}. Pass {option} {saved_value}, "
                f"{_REMEDY}."
            )
        holds = "the checkpoint's weights hold" if name == "pretrained" else "the command line's holds"
        lines.append(f"{option} was {saved_value}, now {value}: {holds}")
    epochs_begun = saved["position"]["epoch"] + (saved["position"]["visited"] > 0)
    if current["config"]["epochs"] < epochs_begun and not current["config"].get("max_steps"):
        epochs = current["config"]["epochs"]
        raise BadInput(
            f"--epochs {epochs}: this run is in epoch {epochs_begun} already. Pass at least {epochs_begun}, {_REMEDY}."
        )
    if saved["np"] != current["np"]:
        kept = "global batch" if current["config"]["global_batch_size"] else "batch per rank"
        ranks = f"{current['np']} rank{'s' if current['np'] > 1 else ''} in place of {saved['np']}"
        batch = f"{current['global_batch']} {unit} per step in place of {saved['global_batch']}"
        lines.append(f"{ranks}: the {kept} is kept, {batch}; random numbers are new ones")
    return lines
