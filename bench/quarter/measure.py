"""Measurements on the GPU, each part in a process: python -m bench.quarter.measure PART [ARGUMENTS AS JSON].

A part prints its figures as one line of JSON, the last of its output. On a CPU parts run small, to find errors.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BEGAN = time.perf_counter()
Figures = dict[str, Any]
SMALL_LR = 1e-5  # at which rounding does not grow from step to step


def answer(figures: Figures) -> None:
    """Print the figures of this process."""
    print(json.dumps(figures), flush=True)


def first() -> None:
    """Seconds until torch, CUDA and Horovod are ready, and the libraries that are loaded then."""
    at_s: dict[str, float] = {}

    def lap(name: str) -> None:
        at_s[name] = round(time.perf_counter() - BEGAN, 2)

    import torch

    lap("import torch")
    figures: Figures = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if torch.cuda.is_available():
        square = torch.randn(1024, 1024, device="cuda")
        (square @ square).sum().item()
        lap("first product")
        images, kernels = torch.randn(8, 3, 64, 64, device="cuda"), torch.randn(8, 3, 3, 3, device="cuda")
        torch.nn.functional.conv2d(images, kernels).sum().item()
        lap("first convolution")
        facts = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        figures |= {"device": facts.name, "multiprocessors": facts.multi_processor_count}
        figures |= {"free MiB": free >> 20, "total MiB": total >> 20}
    import horovod.torch as hvd

    lap("import horovod.torch")
    from hvdtrain.ranks.libraries import library_versions

    wanted = ("libmpi.so", "libnccl.so", "libcudart.so", "libcudnn.so", "libcublas.so", "libcuda.so", "mpi_lib_v2")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    figures |= {name: bool(getattr(hvd, name)()) for name in ("mpi_built", "nccl_built", "cuda_built")}
    loaded = sorted(path for path in mapped if any(name in path for name in wanted))
    answer({**figures, **library_versions(), "at_s": at_s, "loaded": loaded})


def ceilings() -> None:
    """Copies, products and launches of this card: what step times are compared with."""
    import torch

    on_gpu = torch.cuda.is_available()
    device, side = ("cuda", 8192) if on_gpu else ("cpu", 256)
    torch.backends.cuda.matmul.allow_tf32 = True

    def median_s(work: Callable[[], object], repeats: int = 10) -> float:
        times_s = []
        for number in range(3 + repeats):
            wait(device)
            started = time.perf_counter()
            work()
            wait(device)
            if number >= 3:
                times_s.append(time.perf_counter() - started)
        return statistics.median(times_s)

    figures: Figures = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32)):
        one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        figures[f"{name} TFLOP/s"] = round(2 * side**3 / median_s(partial(torch.matmul, one, other)) / 1e12, 1)
    source = torch.randint(0, 255, (2**30 if on_gpu else 2**22,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_s = median_s(partial(target.copy_, source))
    figures["copy GB/s, read and written"] = round(2 * source.numel() / copied_s / 1e9)
    few = torch.zeros(16, device=device)

    def launches() -> None:
        for _ in range(1000):
            few.add_(1)

    figures["us per small kernel"] = round(1000 * median_s(launches, 5), 2)
    if on_gpu:
        pinned = torch.empty(2**28, dtype=torch.uint8).pin_memory()
        sent_s = median_s(lambda: source[: 2**28].copy_(pinned, non_blocking=True))
        figures["host to device GB/s, pinned"] = round(2**28 / sent_s / 1e9, 1)
    answer(figures)


def wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def pair(
    *,
    model: str,
    batch: int,
    pixels: int = 32,
    precision: str = "bf16",
    compiled: bool = False,
    pairs: int = 5,
    block: int = 10,
    warmup: int = 2,
    depthwise: bool = False,
) -> None:
    """Our step and the plain loop's, in turn in one process over the same tensors; and the plain loop's kernels."""
    import hvdtrain
    from bench.cases import overhead
    from bench.pairs import ratio
    from bench.sides import WARMUP_STEPS, Given, Peer, optimizer_of, our_training, start
    from hvdtrain.tasks.vision.settings import EffnetSettings

    overhead.BLOCK = block
    steps = block * (warmup + pairs) - WARMUP_STEPS
    given = Given(model=model, batch=batch, pixels=pixels, precision=precision, compiled=compiled, steps=steps)

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        turns, peer = overhead.Turns(run.device), Peer(given=given)
        training = our_training(run, given, turns)
        known = overhead.switches(training)
        network = peer.network()
        shortest = peer.shortest_step(network, optimizer_of(network))
        other, other_s = None, list[float]()
        if depthwise:
            from bench.quarter.depthwise import convert

            changed = peer.network()
            convert(changed)
            other = peer.shortest_step(changed, optimizer_of(changed))

        def step_s(step: Callable[[], None]) -> float:
            since_s = overhead.now(run.device)
            for _ in range(block):
                step()
            return (overhead.now(run.device) - since_s) / block

        def theirs_s(_: int) -> float:
            known[overhead.AVERAGE](False)
            if other is not None:
                other_s.append(step_s(other))
            return step_s(shortest)

        turns.before = [theirs_s]
        for _ in training:
            pass
        ours_s, plain_s = zip(*turns.measured[0][warmup:], strict=True)
        speedup = ratio(plain_s, ours_s)
        figures: Figures = {
            "given": [model, batch, pixels, precision, "compiled" if compiled else "eager"],
            "ms": round(1000 * statistics.median(ours_s), 3),
            "plain ms": round(1000 * statistics.median(plain_s), 3),
            "images/s": round(batch / statistics.median(ours_s)),
            "plain images/s": round(batch / statistics.median(plain_s)),
            "times as fast": [round(value, 3) for value in (speedup.median, speedup.low, speedup.high)],
            "n": speedup.n,
            "warm-up s": [[round(block * value, 2) for value in both] for both in turns.measured[0][:warmup]],
            "plain loop": profiled(shortest, run.device.type),
        }
        if other is not None:
            faster = ratio(plain_s, other_s[warmup:])
            figures["plain loop with Triton's depthwise convolutions"] = {
                "ms": round(1000 * statistics.median(other_s[warmup:]), 3),
                "times as fast": [round(value, 3) for value in (faster.median, faster.low, faster.high)],
                "warm-up s": [round(block * value, 2) for value in other_s[:warmup]],
                **profiled(other, run.device.type),
            }
        answer(figures)

    start(given, ["--epochs", "1", "--ema-epochs", "2", "--overwrite"], main)


def profiled(step: Callable[[], None], device: str, steps: int = 2, top: int = 25) -> Figures:
    """Return where the device time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as taken:
        for _ in range(steps):
            step()
        wait(device)
    by_name: dict[str, list[float]] = {}
    for event in taken.events() or []:
        if not on_gpu:
            by_name.setdefault(event.name, []).append(event.self_cpu_time_total)
        elif event.device_type.name == "CUDA":
            by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(((sum(us), len(us), name) for name, us in by_name.items()), reverse=True)
    return {
        "busy ms": round(sum(row[0] for row in rows) / 1000 / steps, 2),
        "kernels": sum(row[1] for row in rows) / steps,
        "top": [[round(us / 1000 / steps, 3), count / steps, name[:120]] for us, count, name in rows[:top]],
    }


def side(*, name: str, words: str = "", **given: Any) -> None:
    """The step of one side of bench/sides.py (ours, plain or ddp), with its memory; ours with further options."""
    from bench import sides

    given.setdefault("steps", 20)
    # torchrun could wait for a name server that is not there.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    with TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        more = {"words": [*words.split(), "--overwrite"]} if name == "ours" else {}
        try:
            getattr(sides, name)(out, **more, **given)
        finally:  # ours ends the process
            with suppress(FileNotFoundError):
                found = json.loads(out.read_text())
                step_ms = [1000 * step_s for step_s in found["step_s"]]
                ms = statistics.median(step_ms)
                answer(
                    {
                        "given": {"side": name, **given},
                        "ms": round(ms, 3),
                        "from, to": [round(min(step_ms), 3), round(max(step_ms), 3)],
                        "samples/s": round(1000 * given["batch"] / ms, 1),
                        "memory": found["memory"][0],
                    }
                )


def equal(*, precision: str, model: str = "efficientnet_b0", batch: int = 64, steps: int = 12) -> None:
    """The same steps by hvdtrain and by a plain loop from the same weights: how far losses and weights differ."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler

    import hvdtrain
    from bench import sides
    from hvdtrain.core.task import Batch, Model, Sums
    from hvdtrain.recipe import optim
    from hvdtrain.tasks.vision import models
    from hvdtrain.tasks.vision.settings import EffnetSettings

    class Given(sides.Given):
        def network(self) -> torch.nn.Module:
            torch.manual_seed(0)
            built: torch.nn.Module = models.build(model, classes=sides.CLASSES, dropout=0.0, stochastic_depth=0.0)
            return built

    given = Given(model=model, batch=batch, steps=steps - 2, warmup=2, precision=precision)

    def flat(network: torch.nn.Module) -> Tensor:
        return torch.cat([parameter.detach().double().flatten() for parameter in network.parameters()])

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        training, ours = sides.our_training(run, given), list[Tensor]()
        before, task_loss = flat(training.step.model), training.step.task.loss

        def loss_of(forward: Model, data: Batch, *, training: bool) -> Sums:
            sums = task_loss(forward, data, training=training)
            if training:
                ours.append(sums.loss.detach() / batch)
            return sums

        training.step.task.loss = loss_of  # type: ignore[method-assign, assignment]
        for _ in training:
            pass
        peer = sides.Peer(given=given)
        network = peer.network()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
        lr = SMALL_LR * batch / 256
        groups = optim.parameter_groups(network, 5e-4, decay_all=False)
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
        scaler = GradScaler(peer.device.type, enabled=precision == "fp16")
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        turns, theirs = given.tensors(peer.device, 0, peer.layout), []
        for number in range(steps):
            images, labels = turns[number % len(turns)]
            with torch.autocast(peer.device.type, half, enabled=half is not None):
                loss = F.cross_entropy(network(images), labels)
            theirs.append(loss.detach())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses = [[float(one), float(other)] for one, other in zip(ours, theirs, strict=True)]
        moved, moved_plain = flat(training.step.model) - before, flat(network) - before
        answer(
            {
                "given": [model, batch, precision, f"{steps} steps"],
                "first loss differs by": relative(*losses[0]),
                "a loss differs by at most": max(relative(*pair) for pair in losses),
                "the change of the weights differs by": float((moved - moved_plain).norm() / moved_plain.norm()),
                "losses": [[round(value, 5) for value in pair] for pair in losses],
            }
        )

    words = ["--deterministic", "--schedule", "constant", "--warmup-epochs", "0", "--overwrite"]
    words += ["--lr", str(SMALL_LR)]
    sides.start(given, words, main)


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


def benchmark(*, limit: int, model: str = "efficientnet_b0", batch: int = 256, pixels: int = 224) -> None:
    """The first steps and a later one of a plain loop, by how many kernels cuDNN tries; 0 takes its heuristic's."""
    import torch

    from bench.sides import Given, Peer, optimizer_of

    peer = Peer(given=Given(model=model, batch=batch, pixels=pixels, precision="bf16", steps=1))
    network = peer.network()
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = limit > 0, limit
    step, step_s = peer.shortest_step(network, optimizer_of(network)), []
    for _ in range(15):
        since_s = time.perf_counter()
        step()
        wait(peer.device.type)
        step_s.append(time.perf_counter() - since_s)
    answer(
        {
            "given": [model, batch, pixels, limit],
            "first steps, s": [round(value, 2) for value in step_s[:3]],
            "ms": round(1000 * statistics.median(step_s[5:]), 2),
        }
    )


if __name__ == "__main__":
    part, *arguments = sys.argv[1:]
    sys.argv = sys.argv[:1]
    globals()[part](**json.loads(arguments[0] if arguments else "{}"))
