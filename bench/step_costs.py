"""The cost of a step by --dry-run: the tables of docs/reference/step-costs.md, compared with published measurements.

    python bench/step_costs.py              rewrites the tables of docs/reference/step-costs.md
    python bench/step_costs.py published    prints one of them

No step is timed: costs are computed from shapes, so a busy machine does not affect them. About 5 minutes of CPU.
"""

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torchvision

from hvdtrain import bert, effnet
from hvdtrain.insight.costs.devices import DEVICES, Device
from hvdtrain.insight.costs.report import Cost, usable_bytes
from hvdtrain.program.dry_run import count_step
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "step-costs.md"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published step on one GPU."""

    words: str  # the command line of the same step
    gpu: str  # with the GB of its memory
    speed: float  # samples/s
    outlier: str = ""  # why it differs from the others

    @property
    def device(self) -> Device:
        name, gigabytes = self.gpu.split()
        return dataclasses.replace(DEVICES[name], memory_bytes=int(gigabytes) * GIB)

    @property
    def cost(self) -> Cost:
        """Return the cost with autograd's own squeeze-excitation, which was timed."""
        with patch("hvdtrain.tasks.vision.layers.convert"):
            return cost(self.words)


FP32, TF32, FP16 = "--precision fp32", "--precision tf32", "--precision fp16"
# NVIDIA's DeepLearningExamples, PyTorch/Classification/ConvNets: efficientnet/README.md, the batches from configs.yml.
IMAGENET = "effnet --data imagefolder --data-dir /none"
EFFNET = f"{IMAGENET} --optimizer rmsprop --ema-epochs 0 --batch-size-per-rank {{}} --model efficientnet_{{}} {{}}"
# PyTorch/LanguageModeling/BERT/README.md of the same repository: question answering, and pretraining by LAMB.
LARGE = "--model bert_large --vocab-size 30522 --accumulate-steps 1 --data-dir /none"
ANSWERS = f"bert {LARGE} --data csv --max-tokens 384 --batch-size-per-rank {{}} {{}}"
WORDS = f"bert {LARGE} --task mlm --data text --optimizer lamb --max-tokens {{}} --batch-size-per-rank {{}} {{}}"
ALONE = "by the same table 17.6 times as fast on 8 GPUs: the one was busy with something else"
PUBLISHED = (
    Published(words=EFFNET.format(256, "b0", TF32), gpu="a100 80", speed=1078),
    Published(words=EFFNET.format(256, "b0", FP16), gpu="a100 80", speed=2489),
    Published(words=EFFNET.format(64, "b4", TF32), gpu="a100 80", speed=157),
    Published(words=EFFNET.format(128, "b4", FP16), gpu="a100 80", speed=331),
    Published(words=EFFNET.format(64, "b0", FP32), gpu="v100 16", speed=655),
    Published(words=EFFNET.format(128, "b0", FP16), gpu="v100 16", speed=1301),
    Published(words=EFFNET.format(16, "b4", FP32), gpu="v100 16", speed=83),
    Published(words=EFFNET.format(32, "b4", FP16), gpu="v100 16", speed=204),
    Published(words=EFFNET.format(128, "b0", FP32), gpu="v100 32", speed=646),
    Published(words=EFFNET.format(256, "b0", FP16), gpu="v100 32", speed=1401),
    Published(words=EFFNET.format(32, "b4", FP32), gpu="v100 32", speed=36, outlier=ALONE),
    Published(words=EFFNET.format(64, "b4", FP16), gpu="v100 32", speed=89, outlier=ALONE),
    Published(words=ANSWERS.format(8, FP32), gpu="v100 32", speed=12),
    Published(words=ANSWERS.format(16, FP16), gpu="v100 32", speed=52),
    Published(words=ANSWERS.format(32, TF32), gpu="a100 80", speed=61.5),
    Published(words=ANSWERS.format(32, FP16), gpu="a100 80", speed=110.5),
    Published(words=ANSWERS.format(4, FP32), gpu="v100 32", speed=9.92),
    Published(words=ANSWERS.format(10, FP16), gpu="v100 32", speed=47.4),
    Published(words=WORDS.format(128, 32, FP32), gpu="v100 32", speed=43.52),
    Published(words=WORDS.format(128, 64, FP16), gpu="v100 32", speed=181.76),
    Published(words=WORDS.format(512, 4, FP32), gpu="v100 32", speed=9.0),
    Published(words=WORDS.format(512, 8, FP16), gpu="v100 32", speed=32.32),
    # One A100, CIFAR-10 by torchrun and DDP, efficientnet_b7 on 32 x 32 pixels: docs/explanation/accuracy.md.
    Published(
        words="effnet --recipe book --precision fp32",
        gpu="a100 80",
        speed=1768,
        outlier="two processes read the images, one by one; Adam is not fused",
    ),
)


@cache
def cost(words: str) -> Cost:
    """Return the cost of a step, for a command line that starts with the program."""
    program, *options = words.split()
    if program == "effnet":
        return count_step(effnet.main, SerialComm(), images.parse([*options, "--dry-run"]))
    return count_step(bert.main, SerialComm(), texts.parse([*options, "--dry-run"]))


def ratio(row: Published) -> float:
    """Return the measured speed relative to the roofline's."""
    counted = row.cost
    times = next(device for device in counted.devices if device.name == row.device.name)
    return row.speed * times.roofline_s / (counted.batch_size_per_rank * counted.micro_batches)


def published() -> Iterator[str]:
    """Yield each published step next to its roofline, in Markdown."""
    yield "| model | precision | batch | GPU | measured/s | roofline/s | measured by roofline | bound by | memory | |"
    yield "|---|---|--:|---|--:|--:|--:|---|--:|---|"
    shares: dict[str, list[float]] = {}
    for row in PUBLISHED:
        counted, share = row.cost, ratio(row)
        if not row.outlier:
            shares.setdefault(row.device.name, []).append(share)
        tokens = row.words.partition("--max-tokens ")[2].split(" ")[0]
        needed = counted.memory_bytes.total
        memory = f"{needed / GIB:.1f} GiB{'' if needed <= usable_bytes(row.device) else ': does not fit'}"
        bound = next(device.bound for device in counted.devices if device.name == row.device.name)
        yield (
            f"| {counted.model}{f', {tokens} tokens' if tokens else ''} | {counted.precision} "
            f"| {counted.batch_size_per_rank} | {row.gpu} GB | {row.speed:,.4g} "
            f"| {row.speed / share:,.4g} | {share:.2f} | {bound} | {memory} | {row.outlier} |"
        )
    yield ""
    yield "Without those that the last column explains:"
    yield ""
    for name, found in shares.items():
        median = statistics.median(found)
        yield f"- {name}: median {median:.2f}, from {min(found):.2f} to {max(found):.2f}; n = {len(found)}."


MODELS = {
    "efficientnet_b0, 224 pixels": f"{IMAGENET} --model efficientnet_b0 --batch-size-per-rank 256",
    "efficientnet_b4, 380 pixels": f"{IMAGENET} --model efficientnet_b4 --batch-size-per-rank 64",
    "efficientnet_b7, 600 pixels": f"{IMAGENET} --model efficientnet_b7 --batch-size-per-rank 16",
    "bert_base, 128 tokens": ANSWERS.format(32, "").replace("large", "base").replace("384", "128"),
    "bert_large, 384 tokens": ANSWERS.format(32, ""),
}
PRECISIONS = ("--precision tf32", "--precision bf16")


def models() -> Iterator[str]:
    """Yield a step of each model in each precision, in Markdown."""
    yield "| model | batch | precision | operators | kernels | TFLOP | GB moved | memory | static | most on A100 |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, words in MODELS.items():
        for precision in PRECISIONS:
            counted = cost(f"{words} {precision}")
            memory = counted.memory_bytes
            static = memory.parameters + memory.optimizer + memory.average
            largest = next(device.largest_batch_per_rank for device in counted.devices if device.name == "a100")
            yield (
                f"| {name} | {counted.batch_size_per_rank} | {counted.precision} | {counted.operations:,} "
                f"| {counted.kernels:,} | {counted.flops / 1e12:.3g} | {counted.bytes / 1e9:.1f} "
                f"| {memory.total / GIB:.1f} GiB | {static / 2**20:,.0f} MiB | {largest:,} |"
            )


def beside_torchvision() -> Iterator[str]:
    """Yield b0's step next to that of torchvision's model."""
    words = f"{MODELS['efficientnet_b0, 224 pixels']} --precision bf16"
    with patch("hvdtrain.tasks.vision.models.build", torchvision_model):
        theirs = cost.__wrapped__(words)
    ours = cost(words)
    yield "| model | operators | GB moved | memory |"
    yield "|---|--:|--:|--:|"
    for name, counted in (("ours", ours), ("torchvision's", theirs)):
        memory = counted.memory_bytes.total / GIB
        yield f"| {name} | {counted.operations:,} | {counted.bytes / 1e9:.1f} | {memory:.1f} GiB |"
    yield ""
    yield f"{1 - ours.bytes / theirs.bytes:.1%} fewer bytes."


def torchvision_model(name: str, *, classes: int, **_: object) -> Any:
    """Return torchvision's version of the model."""
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


PARTS = {"models": models, "torchvision": beside_torchvision, "published": published}


def main(names: list[str]) -> None:
    """Print these parts, or write all of them into the page."""
    if names:
        for line in (line for name in names for line in PARTS[name]()):
            print(line, flush=True)
        return
    text = PAGE.read_text()
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: bench/step_costs.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(part()) + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
