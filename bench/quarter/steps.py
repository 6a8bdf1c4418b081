"""The steps of the quarter in the order of their worth: phases one after the other, in each lanes side by side.

What is not timed runs side by side; what is timed runs alone.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.jobs import mpirun
from bench.quarter import checks
from bench.quarter.driver import Lane, Step

Phase = Sequence[Lane]
PYTHON = sys.executable
EFFNET = ("hvdtrain.effnet", "--data", "digits", "--model", "efficientnet_tiny")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Without random numbers, which a GPU draws in another way.
QUIET = ("--precision", "fp32", "--augment", "none", "--dropout", "0", "--report-every-steps", "1")
EXACT = ("--deterministic", "--compression", "none")
# Options of two ranks, and how near their first losses are to those of two ranks on CPUs.
TWO = {
    "horovod": (("--reducer", "horovod", "--compression", "fp16"), 0.02),  # the default on GPUs
    "bucket": ((*EXACT, "--reducer", "bucket"), 1e-3),
    "fusion": ((*EXACT[1:], "--reducer", "horovod", "--fusion-threshold-mb", "0.1"), 1e-3),
    "stages": (("--deterministic", "--stages", "2", "--accumulate-steps", "2"), 1e-3),
    "two-level": ((*EXACT, "--sync", "two-level/1"), 1e-3),
    "sync-bn": ((*EXACT, "--sync-bn"), 1e-3),
    "sharded": ((*EXACT[1:], "--shard-optimizer"), 1e-3),
}
SHAPES: dict[str, dict[str, Any]] = {
    "b0": {"model": "efficientnet_b0", "batch": 256, "pixels": 224, "precision": "bf16"},
    "bert-base": {"model": "bert_base", "batch": 32, "tokens": 128, "precision": "bf16"},
    "b4": {"model": "efficientnet_b4", "batch": 64, "pixels": 380, "precision": "bf16"},
    "bert-large": {"model": "bert_large", "batch": 32, "tokens": 384, "precision": "fp16"},
    "b7": {"model": "efficientnet_b7", "batch": 16, "pixels": 600, "precision": "bf16"},
    "tf32-b0": {"model": "efficientnet_b0", "batch": 256, "pixels": 224, "precision": "tf32"},
}
SMALL = {"model": "efficientnet_tiny", "batch": 8, "pixels": 32}
SMALL_TEXT = {"model": "bert_tiny", "batch": 4, "tokens": 32}


def module(name: str, *words: str) -> tuple[str, ...]:
    return (PYTHON, "-m", name, *words)


def measured(part: str, **arguments: Any) -> tuple[str, ...]:
    return module("bench.quarter.measure", part, json.dumps(arguments))


def schedule(project: Path, work: Path, output: Path, *, small: bool) -> Iterator[Phase]:
    """Yield the phases; `small` ones run on CPUs in seconds."""
    first = Step(
        name="first",
        claim="imports, the first kernels, NCCL in Horovod",
        limit_s=120,
        command=measured("first"),
        check=checks.nccl_built,
    )
    if small:  # a wheel for CPUs is rehearsed as well
        first = replace(first, check=checks.last_json)
    facts = ("bash", here("facts.sh"), f"{output}/facts.txt")
    yield [[first], [Step(name="facts", claim="the machine", limit_s=60, command=facts)]]
    yield list(starts(output, small=small, mpi=project / "scripts/check_mpi.py"))
    yield list(right(project, work, small=small))
    yield [[eager(small=small)]]
    yield [shapes(small=small)]
    yield [rest(project, small=small)]


def pytest_of(project: Path) -> tuple[str, ...]:
    return module("pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "--rootdir", str(project))


def here(name: str) -> str:
    return str(Path(__file__).parent / name)


def starts(output: Path, *, small: bool, mpi: Path) -> Iterator[Lane]:
    """Yield the steps that need an idle GPU, since hvdlaunch rejects a busy one, and one that needs none."""
    run = module("launch", "run", "-np", "1", "--")
    one = (*EFFNET, "--epochs", "2", "--batch-size-per-rank", "32")
    long = (*EFFNET, "--epochs", "1000", "--batch-size-per-rank", "32")
    yield [
        Step(
            name="start",
            claim="hvdlaunch run trains from the wheels",
            limit_s=90,
            command=(*run, *module(*one, "--run", "started")),
            check=checks.finished("started"),
        ),
        Step(
            name="launcher",
            claim="hvdlaunch topo, gpus, check and plan on a real driver; 2 ranks on one GPU are refused",
            limit_s=90,
            command=("bash", here("launcher.sh"), f"{output}/facts.txt"),
            check=lambda _, text: [line for line in text.splitlines() if line.startswith(("+ hvdlaunch", "hvdlaunch"))],
            needs_gpu="no GPU to show",
        ),
        Step(
            name="term",
            claim="SIGTERM to hvdlaunch: the ranks save and leave",
            limit_s=60,
            command=("timeout", "--preserve-status", "40" if small else "15", *run, *module(*long, "--run", "ended")),
            check=checks.saved_on_request("ended"),
        ),
    ]
    yield [
        Step(name="mpi", claim="mpi4py and Horovod share one MPI", limit_s=60, command=(PYTHON, str(mpi)), env=ON_CPU)
    ]


def right(project: Path, work: Path, *, small: bool) -> Iterator[Lane]:
    """Yield the steps that are right or wrong: nothing is timed."""
    pytest, tests = pytest_of(project), project / "tests/gpu"
    yield [
        Step(
            name="gpu-tests",
            claim="tests/gpu: host waits, races, resumed bits, learning in fp32, fp16 and bf16",
            limit_s=170,
            command=(*pytest, "-n", "6", "--dist", "worksteal", f"--ignore={tests}/test_phases.py", str(tests)),
            check=checks.tested,
            needs_gpu="tests/gpu needs a GPU",
        )
    ]
    shape = {"model": SMALL["model"], "batch": SMALL["batch"], "steps": 6} if small else {}
    # Rounding is 2^-24, 2^-11, 2^-11 and 2^-8.
    tolerances = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2}
    for lane in (("fp32", "bf16"), ("tf32", "fp16")):
        yield [
            Step(
                name=f"equal-{precision}",
                claim=f"losses and weights are a plain loop's, {precision}",
                limit_s=70,
                command=measured("equal", precision=precision, **shape),
                check=checks.near(tolerances[precision]),
                needs_gpu="fp16 on CPUs is rejected" if precision == "fp16" else "",
            )
            for precision in lane
        ]

    def as_on_cpu(folder: Path, _: str) -> checks.Figures:
        return checks.same_curve(folder, "here", work / "steps/on-cpu", "here", near=2e-4, far=0.05)

    one = ("--batch-size-per-rank", "32", "--epochs", "1", "--deterministic", *QUIET, "--run", "here")
    profile = ("--epochs", "3", "--batch-size-per-rank", "64", "--profile=trace:5", "--run", "profiled")
    yield [
        Step(
            name="on-cpu",
            claim="losses of the host's CPU",
            limit_s=90,
            command=module(*EFFNET, *one),
            env=ON_CPU | {"OMP_NUM_THREADS": "2"},
            check=checks.finished("here"),
        ),
        Step(
            name="as-on-cpu",
            claim="losses are a CPU's, step by step (fp32 without TF32)",
            limit_s=60,
            command=module(*EFFNET, *one),
            check=as_on_cpu,
        ),
        Step(
            name="profile",
            claim="--profile=trace:5: phases by CUDA events, and CUPTI's trace",
            limit_s=60,
            command=module(*EFFNET, *profile),
            check=profiled,
        ),
    ]
    yield from two_ranks(work)
    auto = [*EFFNET, "--global-batch-size", "64"]
    if not small:
        auto = ["hvdtrain.effnet", "--data", "synthetic", "--model", "efficientnet_b0", "--global-batch-size", "8192"]
    yield [
        Step(
            name="auto",
            claim="--batch-size-per-rank auto meets out of memory and continues",
            limit_s=80,
            command=module(*auto, "--batch-size-per-rank", "auto", "--epochs", "1", "--run", "auto"),
            env={"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.1"},
            check=fitted,
        )
    ]
    yield [
        Step(
            name=f"benchmark-tiny-{limit}",
            claim=f"the first steps of efficientnet_tiny if cuDNN tries {limit} kernels",
            limit_s=60,
            command=measured("benchmark", limit=limit, **SMALL),
            check=checks.last_json,
            needs_gpu="cuDNN needs a GPU",
        )
        for limit in (10, 3, 0)
    ]
    yield [
        Step(  # it begins to measure when all others have ended: its compilers take longer
            name="pair-compiled",
            claim="our step beside a plain loop, both compiled: b0, 224 pixels, batch 256, bf16",
            limit_s=300,
            command=measured("pair", **SHAPES["b0"], compiled=True),
            check=checks.last_json,
            needs_gpu="takes minutes on CPUs",
        )
    ]


def profiled(folder: Path, _: str) -> checks.Figures:
    """Return the verdict and the number of traces."""
    traces = len(list((folder / "runs/effnet/profiled/profile").glob("*trace.json.gz")))
    assert traces == 1, f"{traces} traces"
    return {"profile": checks.document(folder, "profiled")["profile"], "traces": traces}


def fitted(folder: Path, _: str) -> checks.Figures:
    """Return the batch sizes that were chosen."""
    derived = checks.document(folder, "auto", "config")["derived"]
    return {name: derived[name] for name in ("micro_batch", "global_batch", "steps")}


def two(case: str, *, hides_gpu: bool) -> tuple[str, ...]:
    """Return the command of two ranks; those on the GPU share it."""
    options, _ = TWO[case]
    own = ("--epochs", "1", "--batch-size-per-rank", "32", *QUIET)
    shared = () if hides_gpu else ("bench.quarter.two_on_one",)
    return (*mpirun(2), PYTHON, "-m", *shared, *EFFNET, *own, *options, "--run", case)


def two_ranks(work: Path) -> Iterator[Lane]:
    """Yield two ranks on the one GPU through NCCL, each case after its run on CPUs."""
    yield [
        Step(
            name="two-sums",
            claim="Horovod's sums of 2 ranks over NCCL wait for late streams",
            limit_s=60,
            command=(*mpirun(2), *module("bench.quarter.two_on_one", "sums")),
            env=ROOT | {"NCCL_DEBUG": "WARN"},
            check=checks.sums_are_right,
        )
    ]

    def same(case: str, tolerance: float, folder: Path, _: str) -> checks.Figures:
        return checks.same_curve(folder, case, work / f"steps/two-cpu-{case}", case, near=tolerance)

    for case, (options, tolerance) in TWO.items():
        yield [
            Step(
                name=f"two-cpu-{case}",
                claim=f"losses of 2 ranks on CPUs: {shlex.join(options)}",
                limit_s=60,
                command=two(case, hides_gpu=True),
                env=ON_CPU | ROOT | {"OMP_NUM_THREADS": "1"},
                check=checks.finished(case),
            ),
            Step(
                name=f"two-{case}",
                claim=f"2 ranks on one GPU over NCCL have the losses of CPUs: {shlex.join(options)}",
                limit_s=80,
                command=two(case, hides_gpu=False),
                env=ROOT | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "20", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40"},
                check=partial(same, case, tolerance),
                needs_gpu="on CPUs it is the run that it would be compared with",
            ),
        ]


def eager(*, small: bool) -> Step:
    """Return the speed of a step next to a plain loop's, and to a candidate's."""
    tiny = {**SMALL, "block": 2, "pairs": 2, "warmup": 1, "precision": "tf32"}
    return Step(
        name="pair",
        claim="our step beside a plain loop, eager: b0, 224 pixels, batch 256, bf16",
        limit_s=110,
        command=measured("pair", **(tiny if small else SHAPES["b0"]), depthwise=True),
        check=checks.last_json,
    )


def shapes(*, small: bool) -> Lane:
    """Return time and memory of our step, to be compared with --dry-run."""
    known = {"b0": SMALL, "bert-base": SMALL_TEXT} if small else SHAPES
    return [
        Step(
            name=f"shape-{name}",
            claim=f"time and memory of our step: {' '.join(str(value) for value in shape.values())}",
            limit_s=60,
            command=measured("side", name="ours", **shape, **({"steps": 2} if small else {})),
            check=checks.last_json,
        )
        for name, shape in known.items()
    ]


def rest(project: Path, *, small: bool) -> Lane:
    """Return what is left when the others are done, and for a second command."""
    run = (PYTHON, f"{project}/bench/run.py")
    b0 = "efficientnet_b0:224:256:bf16"
    steps = [b0, f"{b0}:contiguous", f"{b0}:inplace", f"{b0}:graph", "efficientnet_b0:224:64:bf16"]
    launch_bound = {"model": "efficientnet_b0", "batch": 256, "precision": "tf32"}
    images = ("--images", "16", "--drawn", "512", "--rounds", "1") if small else ("--images", "400", "--drawn", "5120")
    return [
        Step(
            name="pair-small",
            claim="our step beside a plain loop where launches bind: b0, 32 pixels, TF32",
            limit_s=45,
            command=measured("pair", **launch_bound),
            check=checks.last_json,
            needs_gpu="is `pair` on CPUs",
        ),
        Step(
            name="clock",
            claim="phases are those of the device (tests/gpu/test_phases.py)",
            limit_s=40,
            command=(*pytest_of(project), f"{project}/tests/gpu/test_phases.py"),
            check=checks.tested,
            needs_gpu="tests/gpu needs a GPU",
        ),
        Step(
            name="ceilings",
            claim="copies, products and launches of this card",
            limit_s=30,
            command=measured("ceilings"),
            check=checks.last_json,
        ),
        Step(
            name="benchmark-0",
            claim="a plain loop's step of b0 if cuDNN tries no kernels",
            limit_s=40,
            command=measured("benchmark", limit=0),
            check=checks.last_json,
            needs_gpu="cuDNN needs a GPU",
        ),
        Step(
            name="ablate",
            claim="channels_last, in-place SiLU, CUDA graph, batch 64: one change at a time",
            limit_s=110,
            command=(*run, "kernels", "--steps", *(["efficientnet_tiny:32:2:bf16"] if small else steps)),
            check=checks.rows("kernels"),
        ),
        Step(
            name="sums",
            claim="Horovod's sums over NCCL on one rank, by its cycle; no gradient is sent too early",
            limit_s=60,
            command=(*run, "sums", "--cycles-ms", "1", *(() if small else ("5",))),
            env=ROOT,
            check=checks.rows("sums"),
        ),
        Step(
            name="plain-b0",
            claim="time and memory of a plain loop: b0, 224 pixels, batch 256, bf16",
            limit_s=40,
            command=measured("side", name="plain", **(SMALL if small else SHAPES["b0"]), steps=2 if small else 20),
            check=checks.last_json,
        ),
        Step(
            name="jpegs",
            claim="images/s of JPEGs and of resident images, ours and a DataLoader's",
            limit_s=90,
            command=(*run, "input", *images, *(() if small else ("--rounds", "3"))),
            check=checks.rows("input"),
        ),
    ]
