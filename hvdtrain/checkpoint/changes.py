"""What differs between a run that goes on and its checkpoint: refused, or told."""

import json
from collections.abc import Mapping
from typing import Any

from hvdtrain.safety.exits import BadInput

# Settings that say what the tensors mean: with another value of one of them a checkpoint is of no use.
_SHAPING = ("model", "stem_stride", "data", "optimizer", "decay_all", "seed")
# Settings that say where a run is kept and what is watched, not what it computes.
_ASIDE = (
    *("resume", "overwrite", "runs_dir", "experiment", "run", "data_dir", "checkpoint_every_s"),
    *("checkpoint_every_steps", "keep", "hang_timeout_s", "report_every_steps", "profile", "torch_profile", "timeline"),
)
_REMEDY = "another --run, or --resume never to start anew"


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a checkpoint's manifest keeps them."""
    return dict(json.loads(json.dumps(dict(settings), default=str)))


def changed(about: Mapping[str, Any], settings: Mapping[str, Any], *, training_images: int) -> list[str]:
    """One line for each setting that is not the checkpoint's; BadInput for one that must be, and for other data.

    `about` is the checkpoint's, as `Saves` has written it; `settings` are those of the command line, as JSON.
    """
    if about["images"] != training_images:
        raise BadInput(
            f"this run's checkpoint is of {about['images']} training images, now there are {training_images}: give the "
            f"same data, {_REMEDY}"
        )
    then, lines = about["config"], []
    for name in sorted(then.keys() | settings.keys()):
        was, now = then.get(name), settings.get(name)
        if was == now or name in _ASIDE:
            continue
        option = "--" + name.replace("_", "-")
        if name in _SHAPING or (name == "ema_epochs" and not (was and now)):
            raise BadInput(f"{option} {now}: this run's checkpoint has {was}: give that, {_REMEDY}")
        holds = "the checkpoint's weights hold" if name == "pretrained" else "the command line's holds"
        lines.append(f"{option} was {was}, now {now}: {holds}")
    begun = about["position"]["epoch"] + (about["position"]["visited"] > 0)
    if settings["epochs"] < begun:
        raise BadInput(f"--epochs {settings['epochs']}: this run is in epoch {begun} already: give more, or {_REMEDY}")
    return lines
