"""What differs between a run that goes on and its checkpoint: refused, or one line each."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hvdtrain.safety.exits import BadInput

_REMEDY = "another --run, or --resume never to start anew"


def about(
    settings: Mapping[str, Any], *, np: int, global_batch: int, samples: int, unit: str, content: str | None = None
) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run: settings, ranks, samples per step and in the training split.

    `content` is the data's SHA-256, where it is known.
    """
    plain = json.loads(json.dumps(dict(settings), default=str))
    sizes = {"np": np, "global_batch": global_batch, "samples": samples, "unit": unit, "content": content}
    return {**sizes, "config": plain}


def changed(
    then: Mapping[str, Any], now: Mapping[str, Any], *, shaping: Collection[str], aside: Collection[str]
) -> list[str]:
    """One line for each thing that is not the checkpoint's; BadInput for what must be.

    `then` is the checkpoint's `about` with its position, `now` this run's `about`. With another value of a setting in
    `shaping` the checkpoint's tensors mean something else; settings in `aside` change nothing that is computed.
    """
    unit = now["unit"]
    if then["samples"] != now["samples"]:
        raise BadInput(
            f"this run's checkpoint is of {then['samples']} training {unit}, now there are {now['samples']}: give the "
            f"same data, {_REMEDY}"
        )
    if then.get("content") != now.get("content"):
        raise BadInput(f"this run's checkpoint is of other {unit} than those that are here now: {_REMEDY}")
    is_fixed = now["config"].get("max_steps") and not now["config"]["elastic"]  # there each loss changes it
    if is_fixed and then["global_batch"] != now["global_batch"]:
        raise BadInput(
            f"--max-steps: this run's checkpoint has {then['global_batch']} {unit} per step, now there are "
            f"{now['global_batch']}: give --global-batch-size {then['global_batch']}, {_REMEDY}"
        )
    if now["config"].get("max_steps") and then["config"].get("max_steps") == now["config"]["max_steps"]:
        # As many as these steps are, with as many ranks as an elastic run has left.
        aside = [*aside, "epochs", *(["warmup_epochs"] if now["config"]["elastic"] else [])]
    lines = []
    for name in sorted(then["config"].keys() | now["config"].keys()):
        was, given = then["config"].get(name), now["config"].get(name)
        if was == given or name in aside:
            continue
        option = "--" + name.replace("_", "-")
        if name in shaping or (name == "ema_epochs" and not (was and given)):
            raise BadInput(f"{option} {given}: this run's checkpoint has {was}: give that, {_REMEDY}")
        holds = "the checkpoint's weights hold" if name == "pretrained" else "the command line's holds"
        lines.append(f"{option} was {was}, now {given}: {holds}")
    begun = then["position"]["epoch"] + (then["position"]["visited"] > 0)
    if now["config"]["epochs"] < begun and not now["config"].get("max_steps"):
        epochs = now["config"]["epochs"]
        raise BadInput(f"--epochs {epochs}: this run is in epoch {begun} already: give more, or {_REMEDY}")
    if then["np"] != now["np"]:
        kept = "global batch" if now["config"]["global_batch_size"] else "batch per rank"
        ranks = f"{now['np']} rank{'s' if now['np'] > 1 else ''} in place of {then['np']}"
        batch = f"{now['global_batch']} {unit} per step in place of {then['global_batch']}"
        lines.append(f"{ranks}: the {kept} is kept, {batch}; random numbers are new ones")
    return lines
