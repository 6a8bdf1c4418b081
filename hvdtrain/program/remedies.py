"""Remedies that `hvdlaunch tune` tries to make a training faster: options compatible with the command line."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.program.settings import Settings
from hvdtrain.ranks.libraries import sees_gpus
from hvdtrain.safety.exits import BadInput, print_answer
from hvdtrain.settings import group
from hvdtrain.settings.command_line import option

# For each measured run: it does not end by itself, and writes no checkpoints.
MEASURE = ("--epochs", "100000", "--checkpoint-every-s", "0", "--experiment", "tune")
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

    def document(self) -> dict[str, Any]:
        """Return the remedy as JSON for hvdlaunch."""
        return {
            "name": self.name,
            "options": self.options,
            "environment": dict(self.environment),
            "what_for": self.what_for,
            "same_training": self.same_training,
        }


def print_remedies(settings: Settings) -> None:
    """Print the remedies that apply to these settings."""
    found = fitting_remedies(settings, has_gpus=sees_gpus(), cores=len(os.sched_getaffinity(0)), environment=os.environ)
    document = {
        "measure": MEASURE,
        "profile": PROFILE,
        "epochs": settings.epochs,
        "remedies": [{**remedy.document(), "not_with": _excluded(settings, remedy, found)} for remedy in found],
    }
    print_answer(json.dumps(document, indent=1))


def fitting_remedies(settings: Settings, *, has_gpus: bool, cores: int, environment: Mapping[str, str]) -> list[Remedy]:
    """Return the remedies that change something and work with the other settings, in the order of trial."""
    remedies = (
        *_of_numbers(settings, has_gpus=has_gpus),
        *_of_sums(settings, has_gpus=has_gpus),
        *_of_threads(environment, cores=0 if has_gpus else cores),
        *_of_models(settings),
        *_of_another_training(settings),
    )
    return [remedy for remedy in remedies if _is_fitting(settings, remedy)]


def _excluded(settings: Settings, remedy: Remedy, others: Sequence[Remedy]) -> list[str]:
    """The names of those that do not work with it: without this the first one that is credited would rule it out."""
    both = {other.name: replace(remedy, settings={**other.settings, **remedy.settings}) for other in others}
    return [name for name, together in both.items() if not _is_fitting(settings, together)]


def _is_fitting(settings: Settings, remedy: Remedy) -> bool:
    changed = replace(settings, **remedy.settings)
    try:
        group.check(changed, set(remedy.settings))
        group.require_complete(changed)
    except BadInput:
        return False
    return True


def _of_numbers(settings: Settings, *, has_gpus: bool) -> Iterator[Remedy]:
    if settings.precision == "fp32":
        for precision in ("bf16", *(["fp16"] if has_gpus else [])):
            yield Remedy(what_for=COMPUTATION, settings={"precision": precision})
    if settings.compression == "none" or (settings.compression is None and not has_gpus):
        yield Remedy(what_for=COMMUNICATION, settings={"compression": "fp16"})


def _of_sums(settings: Settings, *, has_gpus: bool) -> Iterator[Remedy]:
    for size_mb in (4.0, 64.0):
        if settings.fusion_threshold_mb != size_mb:
            yield Remedy(what_for=COMMUNICATION, settings={"fusion_threshold_mb": size_mb})
    reducer = settings.reducer or ("horovod" if has_gpus else "bucket")
    yield Remedy(what_for=COMMUNICATION, settings={"reducer": "bucket" if reducer == "horovod" else "horovod"})
    if settings.sync == "flat":
        yield Remedy(what_for=COMMUNICATION, settings={"sync": "two-level"})
    for algorithm in ("Tree", "Ring") if has_gpus else ():
        yield Remedy(what_for=COMMUNICATION, environment={"NCCL_ALGO": algorithm})


def _of_threads(environment: Mapping[str, str], *, cores: int) -> Iterator[Remedy]:
    """Yield other numbers of threads than the environment's; without one the ranks share their host's cores."""
    if "OMP_NUM_THREADS" not in environment:
        return
    threads = 1
    while threads <= cores:
        if str(threads) != environment["OMP_NUM_THREADS"]:
            yield Remedy(what_for=COMPUTATION, environment={"OMP_NUM_THREADS": str(threads)})
        threads *= 2


def _of_models(settings: Settings) -> Iterator[Remedy]:
    if not settings.compile:
        yield Remedy(what_for=COMPUTATION, settings={"compile": True})
    passes = settings.accumulate_steps
    if passes > 1 and passes % 2 == 0:  # the same global batch
        sizes = _batch(settings, 2) if settings.global_batch_size is None else {}
        yield Remedy(what_for=COMPUTATION, settings={**sizes, "accumulate_steps": passes // 2})


def _of_another_training(settings: Settings) -> Iterator[Remedy]:
    def another(what_for: str, **changed: Any) -> Remedy:
        return Remedy(what_for=what_for, same_training=False, settings=changed)

    for times in (4, 16):
        yield another(ALL, **_batch(settings, times))  # the recipe scales its rate with the global batch
    if settings.global_batch_size is None:
        yield another(COMMUNICATION, accumulate_steps=4 * settings.accumulate_steps)
    if settings.sync != "local":
        for steps in (4, 16):
            yield another(COMMUNICATION, sync="local", sync_every=str(steps))
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
