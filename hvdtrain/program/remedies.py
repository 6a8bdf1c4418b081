"""Remedies that `hvdlaunch tune` tries to make a training faster: options compatible with the command line."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.program.settings import Settings
from hvdtrain.ranks.libraries import sees_gpus
from hvdtrain.settings import group
from hvdtrain.settings.command_line import option
from hvdtrain.settings.safety.exits import BadInput, print_answer

# For each measured run: it does not end by itself, and writes no checkpoints.
MEASURE = ("--epochs", "100000", "--checkpoint-every", "0s", "--run", "tune/")
# For the run that profiles a step; the options make it report often.
PROFILE = ("--profile", "--report-every-steps", "4")
COMMUNICATION, COMPUTATION, ALL = "communication", "computation", "the whole step"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of settings, or of the environment."""

    what_for: str  # the part of a step that it shortens
    same_training: bool = True  # False: accuracy may change
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """The command-line options of the remedy."""
        return [word for name, value in self.settings.items() for word in _words(name, value)]

    @property
    def name(self) -> str:
        """The variables and options as a shell takes them."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), *self.options])


def print_remedies(settings: Settings) -> None:
    """Print the remedies that apply to these settings, as JSON for hvdlaunch."""
    found = fitting_remedies(settings, has_gpus=sees_gpus(), cores=len(os.sched_getaffinity(0)), environment=os.environ)
    remedies = [
        {
            "name": remedy.name,
            "options": remedy.options,
            "environment": dict(remedy.environment),
            "what_for": remedy.what_for,
            "same_training": remedy.same_training,
            # Without these the first one that is credited would rule it out.
            "not_with": [other.name for other in found if not _fits(settings, {**other.settings, **remedy.settings})],
        }
        for remedy in found
    ]
    document = {"measure": MEASURE, "profile": PROFILE, "epochs": settings.epochs, "remedies": remedies}
    if getattr(settings, "max_steps", None) is not None:  # which --epochs excludes
        document |= {"measure": ("--max-steps", *MEASURE[1:]), "epochs": None}
    print_answer(json.dumps(document, indent=1))


def fitting_remedies(settings: Settings, *, has_gpus: bool, cores: int, environment: Mapping[str, str]) -> list[Remedy]:
    """Return the remedies that change something and work with the other settings, in the order of trial."""
    variables = [(COMMUNICATION, "NCCL_ALGO", algorithm) for algorithm in ("Tree", "Ring") if has_gpus]
    if not has_gpus and (own := environment.get("OMP_NUM_THREADS")) is not None:  # else ranks share their host's cores
        threads = [str(2**power) for power in range(cores.bit_length())]
        variables = [(COMPUTATION, "OMP_NUM_THREADS", count) for count in threads if count != own]
    remedies = (
        *_of_same_training(settings, has_gpus=has_gpus),
        *(Remedy(what_for=what_for, environment={name: value}) for what_for, name, value in variables),
        *_of_another_training(settings),
    )
    return [remedy for remedy in remedies if _fits(settings, remedy.settings)]


def _fits(settings: Settings, change: Mapping[str, Any]) -> bool:
    changed = replace(settings, **change)
    try:
        group.check(changed, set(change))
        group.require_complete(changed)
    except BadInput:
        return False
    return True


def _of_same_training(settings: Settings, *, has_gpus: bool) -> Iterator[Remedy]:
    is_fp32, passes = settings.precision in ("tf32", "fp32"), settings.accumulate_steps
    is_sent_whole = settings.compression == "none" or (settings.compression is None and not has_gpus)
    reducer = settings.reducer or ("horovod" if has_gpus else "bucket")
    sizes = _batch(settings, 2) if settings.global_batch_size is None else {}
    rows = (
        (COMPUTATION, {"precision": "bf16"}, is_fp32),
        (COMPUTATION, {"precision": "fp16"}, is_fp32 and has_gpus),
        (COMMUNICATION, {"compression": "fp16"}, is_sent_whole),
        (COMMUNICATION, {"fusion_threshold_mb": 4.0}, settings.fusion_threshold_mb != 4),
        (COMMUNICATION, {"fusion_threshold_mb": 64.0}, settings.fusion_threshold_mb != 64),
        (COMMUNICATION, {"reducer": "bucket" if reducer == "horovod" else "horovod"}, True),
        (COMMUNICATION, {"sync": "two-level"}, settings.sync == "flat"),
        (COMPUTATION, {"compile": True}, not settings.compile),
        (COMPUTATION, {**sizes, "accumulate_steps": passes // 2}, passes > 1 and passes % 2 == 0),  # the same batch
    )
    for what_for, change, applies in rows:
        if applies:
            yield Remedy(what_for=what_for, settings=change)


def _of_another_training(settings: Settings) -> Iterator[Remedy]:
    def another(what_for: str, **changed: Any) -> Remedy:
        return Remedy(what_for=what_for, same_training=False, settings=changed)

    for times in (4, 16):
        yield another(ALL, **_batch(settings, times))  # the recipe scales its rate with the global batch
    if settings.global_batch_size is None:
        yield another(COMMUNICATION, accumulate_steps=4 * settings.accumulate_steps)
    if not settings.sync.startswith("local"):
        for steps in (4, 16):
            yield another(COMMUNICATION, sync=f"local:{steps}")
    if settings.compression in (None, "none", "fp16"):
        yield another(COMMUNICATION, compression="powersgd:2")


def _batch(settings: Settings, times: int) -> dict[str, int]:
    if settings.global_batch_size is not None:
        return {"global_batch_size": times * settings.global_batch_size}
    assert settings.batch_size_per_rank != "auto", "which stands with a global batch size alone"
    return {"batch_size_per_rank": times * settings.batch_size_per_rank}


def _words(name: str, value: Any) -> list[str]:
    if value is True:
        return [option(name)]
    return [option(name), f"{value:g}" if isinstance(value, float) else str(value)]
