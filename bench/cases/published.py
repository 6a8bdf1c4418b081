"""Public tables of runs over several hosts, compared with predictions of `hvdlaunch estimate` from their smallest size.

Sources: NVIDIA DeepLearningExamples, EfficientNet on DGX A100 80 GB (PyTorch; TensorFlow 2, batches from its
train_benchmark_8xA100-80G.sh). Horovod, 512 P100, 4 in a host, 25 Gbit/s RoCE, batch 64: efficiencies from its README;
speed of ResNet-101 from its docs (1,656.8 images/s on 16), of the other models the speed of one P100 in TensorFlow's
benchmarks of 2017. Goyal 2017, 256 P100, 50 Gbit/s, 90 epochs of 1,281,167 images in an hour; Akiba 2017, 1,024 P100,
FDR twice, fp16 sums, in 15 minutes; Mikami 2018 (Sony), 1,088 V100, 4 in a host, EDR twice, in 224 s. nccl-tests from
stas00/ml-engineering.
Held back, no constant but the range was chosen by these: NVIDIA's EfficientNet v2-S (TensorFlow 2, DGX A100 and
DGX-1, batches from its train_benchmark_*.sh) and Transformer-XL large (PyTorch, DGX-2H, 384 tokens, 257 million
parameters by Dai 2019).
Left out, because base or batch is not published: Jia 2018 (2,048 P40), MLPerf (time to accuracy).
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.pairs import Case, Table
from launch.advice.estimate import step as model
from launch.advice.estimate.allreduce import through
from launch.advice.estimate.hardware import MACHINES, Hardware, parse_link
from launch.advice.estimate.inputs import MODELS


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """The results of one source for one program."""

    name: str
    hardware: Hardware
    model: str
    batch_per_gpu: int
    samples_per_s: dict[int, float]  # by GPUs; predicted from the smallest size
    bytes_each: int = 4  # of one gradient


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
    superlinear: bool  # by more than 2 %: no model of losses can predict this

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def linear_error(self) -> float:
        return self.linear / self.published - 1


XL = "transformer_xl_large"
PARAMETERS = MODELS | {XL: 257_000_000}
IMAGENET = 90 * 1_281_167


def _host(name: str, gpus: int, link: str, inside_gb_per_s: float = 12.0) -> Hardware:
    """Return the hosts of a paper; with PCIe 3 inside, unless given."""
    return Hardware(name=name, gpus_per_host=gpus, inside_gb_per_s=inside_gb_per_s, link_gb_per_s=parse_link(link))


def _from_efficiency(gpus: int, speed: float, efficiency: float, base: int) -> dict[int, float]:
    """Return the speed of `base` GPUs from the efficiency of `gpus` GPUs and their speed per GPU."""
    return {base: speed / efficiency * base / gpus, gpus: speed}


def _nvidia(
    name: str, machine: str, network: str, batch: int, speeds: dict[int, float], *, bytes_each: int = 4
) -> PublishedTable:
    return PublishedTable(
        name=name,
        hardware=MACHINES[machine],
        model=network,
        batch_per_gpu=batch,
        samples_per_s=speeds,
        bytes_each=bytes_each,
    )


def _horovod(name: str, network: str, alone: float, over_16: float, over_512: float) -> PublishedTable:
    """Return a table from the speed-up of 16 GPUs over one, and the efficiency of 512."""
    return PublishedTable(
        name=name,
        hardware=_host("Horovod's P100", 4, "25gbit"),
        model=network,
        batch_per_gpu=64,
        samples_per_s={16: over_16 * alone, 512: over_512 * 512 * alone},
    )


CHECKED = (
    _nvidia("PyTorch B0 AMP", "dgx-a100", "efficientnet_b0", 256, {8: 16652, 16: 29332}),
    _nvidia("PyTorch B0 TF32", "dgx-a100", "efficientnet_b0", 256, {8: 8193, 16: 16137}),
    _nvidia("PyTorch B4 TF32", "dgx-a100", "efficientnet_b4", 64, {8: 1223, 16: 2417, 32: 4813, 64: 9146}),
    _nvidia("TF2 Horovod B0 AMP", "dgx-a100", "efficientnet_b0", 1024, {8: 20647, 16: 40644}),
    _nvidia("TF2 Horovod B4 AMP", "dgx-a100", "efficientnet_b4", 160, {8: 3550, 32: 12908, 64: 25455}),
)
OTHERS = (
    _horovod("Horovod ResNet-101", "resnet101", 1656.8 / 14.6, 14.6, 0.90),
    _horovod("Horovod Inception V3", "inception_v3", 142, 15.0, 0.90),
    _horovod("Horovod VGG-16", "vgg16", 154, 13.7, 0.68),
    PublishedTable(
        name="Goyal ResNet-50",
        hardware=_host("Goyal's P100", 8, "50gbit"),
        model="resnet50",
        batch_per_gpu=32,
        samples_per_s=_from_efficiency(256, IMAGENET / 3600, 0.90, 8),
    ),
    PublishedTable(
        name="Akiba ResNet-50",
        hardware=_host("Akiba's P100", 8, "2x56gbit"),
        model="resnet50",
        batch_per_gpu=32,
        samples_per_s=_from_efficiency(1024, IMAGENET / 900, 0.80, 8),
        bytes_each=2,
    ),
)
HELD_BACK = (  # no constant was fitted to these, but the range
    _nvidia("TF2 v2-S TF32", "dgx-a100", "efficientnet_v2_s", 230, {8: 2800, 16: 5950}),
    _nvidia("TF2 v2-S AMP", "dgx-a100", "efficientnet_v2_s", 460, {8: 6600, 16: 14517, 80: 62130}),
)
HELD_BACK_OTHERS = (
    _nvidia("TF2 v2-S FP32, V100", "dgx1-v100", "efficientnet_v2_s", 64, {8: 952, 16: 1668, 32: 3270}),
    _nvidia("TF2 v2-S AMP, V100", "dgx1-v100", "efficientnet_v2_s", 128, {8: 1774, 16: 3750, 32: 7250, 80: 16039}),
    _nvidia("Transformer-XL FP32, V100", "dgx2-v100", XL, 4, {16: 180, 32: 357, 64: 703, 128: 1340}),
    _nvidia("Transformer-XL AMP, V100", "dgx2-v100", XL, 4, {16: 404, 32: 801, 64: 1577, 128: 3098}, bytes_each=2),
)
LARGEST = (  # above the largest size for which a deadline is sought
    PublishedTable(
        name="Sony ResNet-50",
        hardware=_host("Sony's V100", 4, "2x100gbit", 60.0),
        model="resnet50",
        batch_per_gpu=32,
        samples_per_s=_from_efficiency(1088, IMAGENET / 224, 0.916, 4),
        bytes_each=2,
    ),
)


def _bus(gb_per_s: dict[int, float], gpus: int) -> dict[int, float]:
    """Return seconds by bytes from nccl-tests' bus bandwidth by MiB."""
    return {mib << 20: 2 * (gpus - 1) / gpus * (mib << 20) / (speed * 1e9) for mib, speed in gb_per_s.items()}


_A100_US = {1: 101.9, 4: 101.5, 8: 133.5, 16: 276.6, 32: 424, 64: 684.6, 128: 1327.6, 256: 2420.6, 512: 4218.4}
_A100_US[1024] = 8203.9
SUMS = {
    "8 A100": {mib << 20: us * 1e-6 for mib, us in _A100_US.items()},
    "8 H200, NVLS": _bus({1: 39.9, 4: 107, 8: 156, 16: 220, 32: 276, 64: 347, 128: 402, 256: 436, 1024: 464}, 8),
    "4 hosts of 8": _bus({1: 17.1, 4: 40.3, 8: 68.6, 16: 93.9, 64: 84.9, 256: 91.0}, 32),
}


def rows(table: PublishedTable, stragglers: float = model.STRAGGLERS) -> list[Row]:
    """Return the sizes of a table beyond its smallest."""
    job = model.Workload(
        model=table.model,
        unit="images",
        precision="",
        batch_per_gpu=table.batch_per_gpu,
        gradient_bytes=table.bytes_each * PARAMETERS[table.model],
    )
    (told, speed), *others = sorted(table.samples_per_s.items())
    known = model.MeasuredSize(
        gpus=told, per_host=min(told, table.hardware.gpus_per_host), samples_per_s=speed, source=""
    )
    found = []
    for gpus, published in others:
        step = model.predict(job, table.hardware, (known,), gpus, stragglers=stragglers)
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
    """Return the stragglers with which these tables have the smallest mean absolute error."""

    def error(stragglers: float) -> float:
        return statistics.fmean(abs(row.error) for table in tables for row in rows(table, stragglers))

    return min((thousandths / 1000 for thousandths in range(0, 201, 2)), key=error)


def left_out(tables: Sequence[PublishedTable]) -> list[Row]:
    """Predict each table with stragglers that were fitted to the others."""
    return [row for table in tables for row in rows(table, fitted([other for other in tables if other is not table]))]


def sum_errors(times: dict[int, float]) -> list[float]:
    """Return the relative errors of the curve through the smallest and the largest sum, at all other sizes."""
    ordered = sorted(times.items())
    curve = through(ordered)
    return [curve.seconds(size) / seconds - 1 for size, seconds in ordered[1:-1]]


def is_inside(row: Row) -> bool:
    """Return whether the range holds the published speed."""
    return row.low <= row.published <= row.high


def _summary(found: Sequence[Row]) -> str:
    errors, linear = [abs(row.error) for row in found], [abs(row.linear_error) for row in found]
    inside = sum(map(is_inside, found))
    return (
        f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; linear scaling "
        f"{statistics.median(linear):.1%}, {max(linear):.1%}; {inside} of {len(found)} rows inside the range"
    )


def published(_: argparse.Namespace) -> Table:
    """Public tables compared with `hvdlaunch estimate` and with linear scaling, each also left out of the fit."""
    table = Table(
        name="published",
        question="Samples/s that are published, and what is predicted from the smallest size of each table:",
        columns=["table", "GPUs", "published", "predicted", "error", "linear", "range"],
        conditions={"stragglers": model.STRAGGLERS, "fitted to all tables": fitted(CHECKED)},
    )
    groups = {
        "A100, several hosts": CHECKED,
        "other machines": OTHERS,
        "A100, held back": HELD_BACK,
        "other machines, held back": HELD_BACK_OTHERS,
    }
    for row in (row for tables in (*groups.values(), LARGEST) for one in tables for row in rows(one)):
        between = f"{row.low:.0f} to {row.high:.0f}"
        off = (f"{row.error:+.1%}", f"{row.linear_error:+.1%}")
        table.add(row.table, row.gpus, round(row.published), round(row.predicted), *off, between)
    for name, tables in groups.items():
        found = [row for one in tables for row in rows(one)]
        table.conditions[name] = _summary(found)
        kept = [row for row in found if not row.superlinear]
        if len(kept) < len(found):
            table.conditions[f"without {len(found) - len(kept)} that scale better than linear"] = _summary(kept)
    table.conditions["A100, each left out of the fit"] = _summary(left_out(CHECKED))
    for name, times in SUMS.items():
        errors = list(map(abs, sum_errors(times)))
        table.conditions[f"sums, {name}"] = f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    return table


CASES = {"published": Case(measure=published, options={})}
