"""The known facts of a training: from run folders, the JSON of --dry-run, or speeds on the command line."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.advice.estimate.hardware import Hardware
from launch.advice.estimate.step import BUCKET_BYTES, FIRST_BUCKET_BYTES, MeasuredSize, Workload
from launch.documents import Document, parse
from launch.errors import CommandError, harmless
from launch.files import read_text

# Counts of torchvision's models, and of hvdtrain's BERT with 30,522 tokens; verified by a test.
MODELS: dict[str, int] = {
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    "efficientnet_v2_s": 21_458_488,
    "efficientnet_v2_m": 54_139_356,
    "efficientnet_v2_l": 118_515_272,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "inception_v3": 27_161_264,
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
}
_WRITE = "Write it with python -m hvdtrain.effnet --dry-run json."
MAX_RANKS, MAX_COUNT = 1 << 20, 1 << 50  # of ranks and micro-batches, of samples and bytes: no training has more
HOROVOD_BUCKET_BYTES = 128 * 2**20  # Horovod's own fusion threshold, by the release notes of 0.21.0


@dataclass(frozen=True, kw_only=True)
class Known:
    """A training, the sizes with known speed, and other measurements."""

    job: Workload
    measured: tuple[MeasuredSize, ...]
    samples_per_epoch: int | None = None
    epochs: float | None = None
    save_s: float | None = None  # how long a checkpoint holds the training
    watts_per_gpu: float | None = None
    memory_bytes: int | None = None  # of a GPU, from a dry run
    sharded_bytes: int = 0  # of them, divided by the ranks
    is_cpu: bool = False
    data: str | None = None  # the data of a run
    device: str | None = None  # the name of a run's device


def from_speeds(speeds: Mapping[int, float], job: Workload, hardware: Hardware) -> Known:
    """Return the facts for speeds from the command line."""
    known = (
        MeasuredSize(gpus=gpus, per_host=min(gpus, hardware.gpus_per_host), samples_per_s=speed, source="--measured")
        for gpus, speed in speeds.items()
    )
    return Known(job=job, measured=tuple(known))


def parameters_of(name: str) -> int:
    """Return the number of parameters of a model; CommandError for a name that is not in the table."""
    known = MODELS.get(name.lower().replace("-", "_"))
    if known is None:
        raise CommandError(
            f"--model {name!r}: unknown. Pass --dry-run FILE, which the model's program writes with --dry-run json, "
            f"or one of {', '.join(MODELS)}."
        )
    return known


def read_dry_run(text: str, *, name: str, device: str | None) -> Known:
    """Read a dry run's facts about one GPU; CommandError for other JSON, or if this device is missing."""
    try:
        dry = Document(parse(text))
        dry.whole("dry_run", 1, 1)
        devices = [Document(item, f"devices[{number}]") for number, item in enumerate(dry.list("devices"))]
        shown = {harmless(one.text("name")): one for one in devices}
        if device not in shown:
            raise CommandError(
                f"{name}: has {', '.join(shown) or 'no device'}, not {device}. Pass a --machine with one of them."
            )
        micro_batches = dry.whole("micro_batches", 1, MAX_COUNT)
        gradient_bytes = dry.whole("gradient_bytes", 1, MAX_COUNT)
        # A GPU's gradients travel in fp16 unless the dry run's options say otherwise; buckets are filled in fp32.
        travels = min(gradient_bytes / (4 * dry.whole("parameters", 1, MAX_COUNT)), 1.0)
        job = Workload(
            model=harmless(dry.text("model")),
            unit=harmless(dry.text("unit")),
            precision=harmless(dry.text("precision")),
            batch_per_gpu=dry.whole("batch_size_per_rank", 1, MAX_COUNT) * micro_batches,
            gradient_bytes=gradient_bytes,
            micro_batches=micro_batches,
            **_hvdtrain_buckets(BUCKET_BYTES, share=travels),
        )
        known = MeasuredSize(
            gpus=1,
            per_host=1,
            samples_per_s=job.batch_per_gpu / shown[device].number("step_s", 1e-9, 1e9),
            source=f"the dry run's {device}, bound by {harmless(shown[device].text('bound'))}",
            is_dry_run=True,
        )
        return Known(
            job=job,
            measured=(known,),
            memory_bytes=dry.within("memory_bytes").whole("total", 0, MAX_COUNT),
            sharded_bytes=int(dry.optional_number("sharded_bytes", 0, MAX_COUNT) or 0),
        )
    except ValueError as error:
        raise CommandError(f"{name}: not of a dry run ({error}). {_WRITE}") from None


def read_runs(folders: Sequence[Path]) -> Known:
    """Read finished runs of one training at several sizes; CommandError if they are something else."""
    runs = [_read_run(folder) for folder in folders]
    first = runs[0]
    for folder, other in zip(folders, runs, strict=True):
        different = [
            field
            for field in ("model", "unit", "precision", "batch_per_gpu", "micro_batches", "gradient_bytes")
            if getattr(other.job, field) != getattr(first.job, field)
        ]
        if different:
            values = " and ".join(str(getattr(one.job, different[0])) for one in (first, other))
            raise CommandError(
                f"{folders[0]} and {folder}: runs of different trainings ({different[0]} {values}). Pass runs that "
                "differ only in their number of ranks."
            )
        if other.device != first.device:
            raise CommandError(
                f"{folders[0]} and {folder}: on {first.device} and on {other.device}. Pass runs on devices of one kind."
            )
    largest = max(runs, key=lambda known: known.measured[0].gpus)
    sizes: dict[tuple[int, int], list[MeasuredSize]] = {}
    for known in runs:
        sizes.setdefault((known.measured[0].gpus, known.measured[0].per_host), []).append(known.measured[0])
    return replace(largest, measured=tuple(_mean(same) for same in sizes.values()))


def _mean(same: Sequence[MeasuredSize]) -> MeasuredSize:
    """Average several runs of one size."""
    speed = math.fsum(one.samples_per_s for one in same) / len(same)
    return replace(same[0], samples_per_s=speed, source=", ".join(one.source for one in same))


def _read_run(folder: Path) -> Known:
    try:
        result, config, rank = (
            Document(parse(read_text(folder / name))) for name in ("result.json", "config.json", "ranks/rank-0.json")
        )
        ranks, hosts = result.whole("np", 1, MAX_RANKS), len(result.list("hosts"))
        if (sync := config.text("sync")) != "flat":
            raise CommandError(f"{folder}: ran with --sync {harmless(sync)}. Pass a run with --sync flat.")
        derived = config.within("derived")
        if "gradient_bytes" not in derived.values:
            raise CommandError(f"{folder}: ran with stages or slices of the model. Pass a run without them.")
        job, speed = _job_and_speed(result, config)
        if not speed or not 1 <= hosts <= ranks or job.batch_per_gpu < 1:
            raise CommandError(f"{folder}: no speed yet. Let the run finish one epoch.")
        name, per_host = harmless(str(folder)), math.ceil(ranks / hosts)
        energy_wh = result.optional_number("energy_wh", 0, 1e12)
        return Known(
            job=job,
            measured=(MeasuredSize(gpus=ranks, per_host=per_host, samples_per_s=speed, source=name),),
            samples_per_epoch=derived.whole("train_samples", 1, MAX_COUNT),
            epochs=min(
                result.number("epochs", 0, 1e9),  # fewer if the program has finished early
                derived.number("steps", 1, 1e15) / derived.number("steps_per_epoch", 1, 1e15),
            ),
            save_s=result.optional_number("checkpoint_hold_s", 0, 1e6) or None,
            watts_per_gpu=3600 * energy_wh / result.number("wall_time_s", 1e-3, 1e12) / ranks if energy_wh else None,
            data=harmless(result.optional_text("data") or "") or None,
            device=harmless(rank.optional_text("device_name") or "") or None,
            is_cpu=(rank.optional_text("device") or "").startswith("cpu"),
        )
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{folder}: not the folder of a training that has ended ({error}). Pass one with a result.json, for "
            "example runs/effnet/one."
        ) from None


def _job_and_speed(result: Document, config: Document) -> tuple[Workload, float]:
    """Return what a run trained, and samples/s of all ranks; 0 if it has not finished an epoch."""
    names = [name for name in result.values if re.fullmatch("train_[a-z]+_per_s", name)]
    if len(names) != 1:
        raise ValueError("it has no speed")
    job = Workload(
        model=harmless(result.text("model")),
        unit=names[0].removeprefix("train_").removesuffix("_per_s"),
        precision=harmless(config.text("precision")),
        batch_per_gpu=result.whole("global_batch", 1, MAX_COUNT) // result.whole("np", 1, MAX_RANKS),
        gradient_bytes=config.within("derived").whole("gradient_bytes", 1, MAX_COUNT),
        micro_batches=config.whole("accumulate_steps", 1, MAX_RANKS),
        **_buckets_of_run(config),
    )
    return job, result.optional_number(names[0], 0, 1e15) or 0.0


def _buckets_of_run(config: Document) -> dict[str, int]:
    """How the run has sent its gradients, as fields of Job."""
    derived = config.within("derived")
    sent_mb = derived.optional_number("fusion_threshold_mb", 0, 1e6)
    if sent_mb is None:
        return {"bucket_bytes": HOROVOD_BUCKET_BYTES}
    if sent_mb == 0:  # each gradient alone
        tensors = derived.whole("gradient_tensors", 1, MAX_COUNT)
        return {"bucket_bytes": max(derived.whole("gradient_bytes", 1, MAX_COUNT) // tensors, 1)}
    size = sent_mb * 2**20
    if config.optional_text("reducer") == "horovod":
        return {"bucket_bytes": max(int(size), 1)}
    return _hvdtrain_buckets(size, share=0.5 if derived.optional_text("compression") == "fp16" else 1.0)


def _hvdtrain_buckets(size: float, *, share: float) -> dict[str, int]:
    """Return the fields of Job for buckets of `size` fp32 bytes with a smaller first one; a `share` of them travels."""
    first = min(FIRST_BUCKET_BYTES, size)
    return {"bucket_bytes": max(int(share * size), 1), "first_bucket_bytes": int(share * first)}
