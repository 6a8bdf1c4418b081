"""Public tables of runs over several hosts, against what `hvdlaunch estimate` predicts from their smallest size.

    python bench/published.py            every row, the errors beside those of linear scaling, and leave-one-out

Sources: NVIDIA DeepLearningExamples, EfficientNet on DGX A100 80 GB (PyTorch; TensorFlow 2, batches from its
train_benchmark_8xA100-80G.sh); P100: Horovod's README and Sergeev 2018 (4 in a host, 25 Gbit/s RoCE, batch 64), Goyal
2017 (8, 50 Gbit/s), Akiba 2017 (8, FDR twice); nccl-tests from stas00/ml-engineering.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from launch.estimate import step as model
from launch.estimate.hardware import MACHINES, Hardware, parse_link
from launch.estimate.models import MODELS


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """What one source says of one program."""

    name: str
    hardware: Hardware
    model: str
    batch_per_gpu: int
    samples_per_s: dict[int, float]  # by GPUs; predicted from the smallest that is here
    gradient_bytes: int = 4  # of one parameter


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published size."""

    table: str
    gpus: int
    published: float
    predicted: float
    linear: float
    low: float
    high: float
    superlinear: bool  # by more than 2 %: no model of losses can be right

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def linear_error(self) -> float:
        return self.linear / self.published - 1


A100 = MACHINES["dgx-a100"]


def _p100(gpus_per_host: int, link: str) -> Hardware:
    # PCIe 3 or NVLink of the first generation: sums between hosts decide
    return Hardware(name="p100", gpus_per_host=gpus_per_host, inside_gb_per_s=12.0, link_gb_per_s=parse_link(link))


def _share(gpus: int, efficiency: float, *, of: int, speed: float) -> dict[int, float]:
    return {of: speed, gpus: speed * gpus / of * efficiency}


CHECKED = (
    PublishedTable(
        name="PyTorch B0 AMP",
        hardware=A100,
        model="efficientnet_b0",
        batch_per_gpu=256,
        samples_per_s={8: 16652, 16: 29332},
    ),
    PublishedTable(
        name="PyTorch B0 TF32",
        hardware=A100,
        model="efficientnet_b0",
        batch_per_gpu=256,
        samples_per_s={8: 8193, 16: 16137},
    ),
    PublishedTable(
        name="PyTorch B4 TF32",
        hardware=A100,
        model="efficientnet_b4",
        batch_per_gpu=64,
        samples_per_s={8: 1223, 16: 2417, 32: 4813, 64: 9146},
    ),
    PublishedTable(
        name="TF2 Horovod B0 AMP",
        hardware=A100,
        model="efficientnet_b0",
        batch_per_gpu=1024,
        samples_per_s={8: 20647, 16: 40644},
    ),
    PublishedTable(
        name="TF2 Horovod B4 AMP",
        hardware=A100,
        model="efficientnet_b4",
        batch_per_gpu=160,
        samples_per_s={8: 3550, 32: 12908, 64: 25455},
    ),
)
OTHERS = (
    # 16 GPUs: 1,656.8 images/s with ResNet-101 in Horovod's README, 14.6 times one; 512: 90 % of 512 times one
    PublishedTable(
        name="Horovod ResNet-101",
        hardware=_p100(4, "25gbit"),
        model="resnet101",
        batch_per_gpu=64,
        samples_per_s=_share(512, 0.90 * 16 / 14.6, of=16, speed=1656.8),
    ),
    PublishedTable(
        name="Horovod Inception V3",
        hardware=_p100(4, "25gbit"),
        model="inception_v3",
        batch_per_gpu=64,
        samples_per_s=_share(512, 0.90 * 16 / 15.0, of=16, speed=15.0 * 130),
    ),
    PublishedTable(
        name="Horovod VGG-16",
        hardware=_p100(4, "25gbit"),
        model="vgg16",
        batch_per_gpu=64,
        samples_per_s=_share(512, 0.68 * 16 / 13.7, of=16, speed=13.7 * 130),
    ),
    PublishedTable(
        name="Goyal ResNet-50",
        hardware=_p100(8, "50gbit"),
        model="resnet50",
        batch_per_gpu=32,
        samples_per_s=_share(256, 0.90, of=8, speed=8 * 32 / 0.26),
    ),
    PublishedTable(
        name="Akiba ResNet-50",
        hardware=_p100(8, "2x56gbit"),
        model="resnet50",
        batch_per_gpu=32,
        gradient_bytes=2,
        samples_per_s=_share(1024, 0.80, of=8, speed=8 * 32 / 0.26),
    ),
)


def rows(table: PublishedTable) -> list[Row]:
    """The sizes of a table beyond its smallest."""
    parameters, tensors = MODELS[table.model]
    job = model.Job(
        model=table.model,
        unit="images",
        precision="",
        batch_per_gpu=table.batch_per_gpu,
        gradient_bytes=table.gradient_bytes * parameters,
        gradient_tensors=tensors,
    )
    (told, speed), *others = sorted(table.samples_per_s.items())
    known = model.Measured(gpus=told, per_host=min(told, table.hardware.gpus_per_host), samples_per_s=speed, source="")
    found = []
    for gpus, published in others:
        step = model.predict(job, table.hardware, (known,), gpus)
        linear = speed * gpus / told
        found.append(
            Row(
                table=table.name,
                gpus=gpus,
                published=published,
                predicted=step.samples_per_s,
                linear=linear,
                low=step.low,
                high=step.high,
                superlinear=published > 1.02 * linear,
            )
        )
    return found


def fitted(tables: Sequence[PublishedTable]) -> float:
    """The stragglers with which these tables have the least mean absolute error."""
    before = model.STRAGGLERS
    errors = {}
    for thousandths in range(0, 201, 2):
        model.STRAGGLERS = thousandths / 1000
        errors[model.STRAGGLERS] = statistics.fmean(abs(row.error) for table in tables for row in rows(table))
    model.STRAGGLERS = before
    return min(errors, key=lambda s: errors[s])
