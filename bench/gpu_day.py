"""The first day on a GPU: what is claimed of GPUs, tried stage after stage, each ended after nine minutes.

    make gpu-day                               every stage that has not ended well yet
    make gpu-day DAY="learn resume"            these, again
    python3 bench/gpu_day.py --wheels dist     on a machine with torch but no network, with what `make wheels` made

build/gpu-day/ has results.json, page.md and a log of each stage. The same command goes on where it was cut off. A stage
that cannot run is NOT RUN, with the reason and without figures. Exit status 1 if a stage has failed.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent.resolve()
SAVE_S = 60.0  # for a run that is ended, to save
# Every command once, small and on the CPU, to find slips before a GPU is paid for. Figures are dropped.
REHEARSAL = "GPU_DAY_REHEARSAL" in os.environ
DIGITS = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64"]
WITHOUT_HOROVOD = "prefetched or feed_waits or never_wait or versions or counted or passes"
PHOTOS = "import sys, pathlib; from input import make; make(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 500)"
B0 = "efficientnet_b0:224:256"
SHAPES = (B0, "efficientnet_b4:380:64", "efficientnet_b7:600:16")
REFERENCE = "one A100, on CIFAR-10: 707 s, 4900 steps, 1768 images/s, accuracy 78.76 %"
Figures = dict[str, Any]


class StageError(Exception):
    """What a stage claims does not hold, or a command of it has failed."""


class NotRunError(Exception):
    """What a stage lacks on this machine."""


class Day:
    """A stage at work: it starts programs, whose output is in its log, until its time is over."""

    def __init__(self, stage: str, folder: Path, gpus: int, limit_s: float) -> None:
        self.folder, self.gpus, self.limit_s = folder, gpus, limit_s
        self.log = folder / f"{stage}.log"
        self.log.unlink(missing_ok=True)
        self._end = time.monotonic() + limit_s

    def call(self, *words: str, status: int = 0, saves: bool = False, env: Mapping[str, str] | None = None) -> None:
        """Run a command, which ends with this status; one that `saves` may be ended when the time is over."""
        with self.log.open("a") as log:
            print(f"$ {shlex.join(words)}", file=log, flush=True)
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            ended = process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            ended = process.wait(SAVE_S)
            if not saves:
                raise StageError(f"not done after {self.limit_s:.0f} s: {shlex.join(words)}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if ended != status:
            raise StageError(f"exit status {ended}: {shlex.join(words)}")

    def answer(self, file: str, *words: str, ranks: int = 0, env: Mapping[str, str] | None = None) -> Any:
        """What a program of bench/ writes into the file that is its first word."""
        out = self.folder / "answer.json"
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        launch = ["hvdlaunch", "run", "-np", str(ranks), *as_root, "--"] if ranks else []
        self.call(*launch, sys.executable, str(BENCH / file), str(out), *words, env=env)
        return json.loads(out.read_text())

    def table(self, name: str, *words: str) -> list[Figures]:
        """The rows of a bench's table."""
        self.call(sys.executable, str(BENCH / f"{name}.py"), *words)
        rows: list[Figures] = json.loads((self.folder / f"build/bench/{name}.json").read_text())["rows"]
        return rows

    def train(self, run: str, *words: str, resume: bool = False, **how: Any) -> Figures:
        """The result of a run of hvdtrain.effnet."""
        folder = self.folder / "runs/effnet" / run
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        self.call(sys.executable, "-m", "hvdtrain.effnet", "--run", run, *words, **how)
        ranks = json.loads((folder / "ranks/rank-0.json").read_text())
        return {**json.loads((folder / "result.json").read_text()), "sha256": ranks.get("weights_sha256")}


def facts(day: Day) -> Figures:
    """What is there?"""
    import torch

    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    named = "" if REHEARSAL else subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    day.call("horovodrun", "--check-build")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "GPUs": named.split("\n"),
        "torch": torch.__version__,
        "NCCL": nccl,
        "build": day.log.read_text().split("\n"),
    }


def first_tests(day: Day, chosen: str = WITHOUT_HOROVOD) -> Figures:
    """tests/gpu that needs no Horovod."""
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(BENCH.parent), "-k", chosen]
    day.call(sys.executable, "-m", "pytest", *words, str(BENCH.parent / "tests/gpu"))
    return {"pytest": day.log.read_text().splitlines()[-1]}


def other_tests(day: Day) -> Figures:
    """The rest of tests/gpu."""
    return first_tests(day, f"not ({WITHOUT_HOROVOD})")


def two_gpus(day: Day) -> Figures:
    """Sums by NCCL over two GPUs."""
    if day.gpus < 2 and not REHEARSAL:
        raise NotRunError("one GPU")
    return dict(day.answer("gpu_sums.py", ranks=2))


def learn(day: Day) -> Figures:
    """Does it learn, in each precision?"""
    how = ["--epochs", "1" if REHEARSAL else "10"]
    precisions = ("fp32",) if REHEARSAL else ("fp32", "bf16", "fp16")
    reached = {one: day.train(one, *DIGITS, *how, "--precision", one)["eval_accuracy"] for one in precisions}
    require(REHEARSAL or min(reached.values()) > 0.9, f"an accuracy is not above 0.9: {reached}")
    return reached


def resume(day: Day) -> Figures:
    """Killed in a step and resumed: the same bits as undisturbed?"""
    words = [*DIGITS, "--epochs", "3", "--deterministic", "--checkpoint-every-steps", "20"]
    whole = day.train("whole", *words)
    shutil.rmtree(day.folder / "runs/effnet/killed", ignore_errors=True)
    command = [sys.executable, "-m", "hvdtrain.effnet", "--run", "killed", *words]
    day.call(*command, status=-signal.SIGKILL, env={"HVDTRAIN_FAULT": "kill@rank0:step50"})
    killed = day.train("killed", *words, resume=True)
    require(killed["resumed"] == 1, f"resumed {killed['resumed']} times")
    require(whole["sha256"] == killed["sha256"], "other weights than those of an undisturbed run")
    return {"the same weights": True}


def step(day: Day) -> Figures:
    """Our step beside a plain loop and DDP."""
    words = "mlp:8 --rounds 1 --steps 2" if REHEARSAL else "efficientnet_b0:256 --rounds 3 --precision bf16"
    return {row["against"]: row for row in day.table("step", "--np", "1", "--models", *words.split())}


def kernels(day: Day) -> Figures:
    """Time, kernels and memory of a step: a plain loop's, and ours of a BERT."""
    cases = [f"{shape}:{precision}" for shape in SHAPES for precision in ("fp32", "bf16", "fp16")]
    found = day.answer("gpu_step.py", *(["efficientnet_tiny:32:2:bf16"] if REHEARSAL else cases))
    bert = ["--model", "bert_tiny", "--batch", "2"] if REHEARSAL else ["--model", "bert_base", "--batch", "32"]
    ours = day.answer("our_masked_words.py", *bert, "--tokens", "128", "--precision", "bf16")
    return {**found, "bert_base:128:32:bf16": {"ms": 1000 * sorted(ours["step_s"])[10], "memory": ours["memory"]}}


def ablate(day: Day) -> Figures:
    """SiLU, memory format, compile, CUDA graph, batch: one change at a time."""
    base = "efficientnet_tiny:32:2:bf16" if REHEARSAL else f"{B0}:bf16"
    changed = [f"{base}:{change}" for change in ("inplace", "contiguous", "compile", "graph")]
    batches = [] if REHEARSAL else [f"efficientnet_b0:224:{batch}:bf16" for batch in (8, 32, 64, 512)]
    return dict(day.answer("gpu_step.py", base, *changed, *batches))


def nccl(day: Day) -> Figures:
    """Sums by NCCL on one rank, by Horovod's cycle in ms."""
    cycles_ms = ("1", "0.5", "5")
    return {ms: day.answer("gpu_sums.py", ranks=1, env={"HOROVOD_CYCLE_TIME": ms}) for ms in cycles_ms}


def jpegs(day: Day) -> Figures:
    """JPEGs: read as fast as computed?"""
    count = "8" if REHEARSAL else "1000"
    rows = day.table("input", "--rounds", "1" if REHEARSAL else "3", "--images", count, "--drawn", "1024")
    photos = day.folder / "photos"
    shutil.rmtree(photos, ignore_errors=True)
    day.call(sys.executable, "-c", PHOTOS, str(photos), count)
    words = ["--model", "efficientnet_tiny", "--batch-size-per-rank", "4"] if REHEARSAL else ["--precision", "bf16"]
    words += ["--data", "imagefolder", "--data-dir", str(photos), "--epochs", "3", "--profile"]
    return {"images/s in training": day.train("photos", *words)["train_images_per_s"], "read": rows}


def cifar10(day: Day) -> Figures:
    """CIFAR-10, 10 epochs of the default recipe."""
    if not has_cifar10():
        raise NotRunError("no data/cifar-10-batches-py")
    words = ["--data-dir", str(Path("data").resolve()), "--epochs", "10", "--precision", "bf16"]
    result = day.train("cifar10", *words)
    return {name: result[name] for name in ("eval_accuracy", "wall_time_s", "train_images_per_s")}


def b7(day: Day) -> Figures:
    """efficientnet_b7, 25 epochs beside the reference; without CIFAR-10 on images of its shape, for the time alone."""
    data = (
        ["--data", "cifar10", "--data-dir", str(Path("data").resolve())] if has_cifar10() else ["--data", "synthetic"]
    )
    weights = any(Path("~/.cache/torch/hub/checkpoints").expanduser().glob("efficientnet_b7*"))
    words = [*data, "--model", "efficientnet_b7", "--epochs", "25", "--pretrained", "hub" if weights else "none"]
    if REHEARSAL:
        words = [*DIGITS, "--epochs", "1", "--pretrained", "none"]
    result = day.train("b7", "--recipe", "book", *words, resume=True, saves=True)
    figures = {name: result[name] for name in ("steps", "wall_time_s", "train_images_per_s", "eval_accuracy")}
    state = "OK" if result["exit_reason"] == "finished" else "GOES ON"
    return {"state": state, "data": data[1], "ImageNet weights": weights, **figures, "reference": REFERENCE}


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StageError(otherwise)


def has_cifar10() -> bool:
    return Path("data/cifar-10-batches-py").is_dir()


Stages = dict[str, Callable[[Day], Figures]]
ALL = (facts, first_tests, other_tests, two_gpus, learn, resume, step, kernels, ablate, nccl, jpegs, cifar10, b7)
STAGES: Stages = {stage.__name__: stage for stage in ALL}


def outcome(name: str, folder: Path, gpus: int, limit_s: float) -> dict[str, Any]:
    """Run a stage if it can run: its state, figures or reason, seconds and log."""
    if not gpus and not REHEARSAL:
        return {"state": "NOT RUN", "reason": "no GPU"}
    day, started = Day(name, folder, gpus, limit_s), time.monotonic()
    try:
        figures = STAGES[name](day)
        found = {"state": figures.pop("state", "OK"), "figures": figures}
    except NotRunError as error:
        return {"state": "NOT RUN", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 (the others are to run)
        found = {"state": "FAILED", "reason": f"{type(error).__name__}: {error}"}
    if REHEARSAL and "figures" in found:
        found = {"state": "REHEARSED"}
    return {**found, "s": round(time.monotonic() - started, 1), "log": str(day.log)}


def cell(value: Any) -> str:
    """A figure in words, numbers to four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(cell(one) for one in value if one != "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["# The first day on a GPU", "", "| stage | | state | figures | s | log |", "|---|---|---|---|--:|---|"]
    for name, stage in STAGES.items():
        found = results.get(name, {"state": "NOT RUN", "reason": "not reached"})
        figures = "<br>".join(f"{what}: {cell(value)}" for what, value in found.get("figures", {}).items())
        told = (found.get("reason", figures), found.get("s", ""), found.get("log", ""))
        cells = [name, str(stage.__doc__).rstrip("."), found["state"], *(str(one).replace("|", "\\|") for one in told)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run(names: list[str], folder: Path, gpus: int, limit_s: float = 540.0) -> int:
    """The stages of these names, or those that have not ended well; all is written down after each."""
    kept = folder / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in names or [name for name in STAGES if results.get(name, {}).get("state") not in ("OK", "REHEARSED")]:
        results[name] = outcome(name, folder, gpus, limit_s)
        kept.with_suffix(".part").write_text(json.dumps(results, indent=1))
        kept.with_suffix(".part").rename(kept)
        (folder / "page.md").write_text(page(results))
        print(f"{name}: {results[name]['state']} {results[name].get('reason', '')}", flush=True)
    print(folder / "page.md")
    return int(any(found["state"] == "FAILED" for found in results.values()))


def take_wheels(wheels: Path, site: Path) -> None:
    """Put them into a folder of their own, before what the machine has."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        sys.exit(f"gpu_day: error: {wheels} has no wheels: run make wheels, or leave out --wheels")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *files], check=True)
    sys.path.insert(0, str(site))
    os.environ["PATH"] = f"{site}/bin:{os.environ['PATH']}"


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    words.add_argument("--wheels", type=Path, help="first install the wheels of this folder, without dependencies")
    chosen = words.parse_args()
    if unknown := set(chosen.stages) - set(STAGES):
        words.error(f"unknown stage {min(unknown)}: choose from {', '.join(STAGES)}")
    folder = Path("build", "gpu-day-rehearsal" if REHEARSAL else "gpu-day").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.wheels:
        take_wheels(chosen.wheels, folder / "site")
    paths = [str(folder / "site"), str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the program of a stage ends with this one
    import torch

    return run(chosen.stages, folder, torch.cuda.device_count())


if __name__ == "__main__":
    sys.exit(main())
