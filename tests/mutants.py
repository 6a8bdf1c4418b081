"""Single-line breaks of hvdtrain and launch: does the suite find them? No part of CI, and no test.

    python tests/mutants.py --check                            every text that is replaced occurs exactly once
    nice python tests/mutants.py --out mutants.jsonl           each break against its room's unit tests: half an hour
    nice python tests/mutants.py --out mutants.jsonl --whole   what they do not find against the whole suite: hours

Every break is made in a new copy of HEAD, so nothing here is touched; what is not committed is not tested. A command
that was cut off goes on where it was: what is known stands in the file, line by line, and a line that is deleted is
tried again. The tests must pass unbroken first. The table comes at the end.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOM_S, WHOLE_S = 600, 1200  # tests that take longer have found the break
WHOLE = ("-n", "2", "--dist", "worksteal")
UNIT_TESTS = {  # where they are not in tests/unit/ROOM
    "program": ("tests/unit/program", "tests/unit/test_effnet.py"),
    "process.py": ("tests/unit/probe", "tests/unit/supervise"),
    "cores.py": ("tests/unit/machine/test_topology.py",),
    "machine/show": ("tests/unit/machine",),
}


class Mutant(NamedTuple):
    """One break: a text within one line, and what a careless programmer might have written."""

    file: str
    original: str
    replacement: str

    @property
    def room(self) -> str:
        """Its folder below the package, or the name of a file that is in none."""
        _, *folders, name = Path(self.file).parts
        return "/".join(folders) or name


MUTANTS = [
    Mutant("hvdtrain/loop/loop.py", "while position.epoch < epochs:", "while position.epoch < first_epoch + epochs:"),
    Mutant("hvdtrain/program/training.py", "feed.align(resume(state, resumed))", "resume(state, resumed)"),
    Mutant("hvdtrain/text/masks.py", "(15 * words + 50) // 100", "15 * words // 100"),
    Mutant("hvdtrain/text/masks.py", "0 if epoch is None else seed", "seed"),
    Mutant("hvdtrain/text/tokens.py", "if (actual := _fingerprint(folder / name)) != expected:", "if False:"),
    Mutant("hvdtrain/text/sequences.py", "starts[:, None] + positions", "positions"),
    Mutant("hvdtrain/text/data.py", "prepare() if comm.local_rank == 0 else None", "prepare()"),
    Mutant("hvdtrain/text/icd10.py", "code[:_FAMILY]", "code"),
    Mutant("hvdtrain/vision/augment.py", "rows = shift[:, 0, None]", "rows = shift[:, 1, None]"),
    Mutant("hvdtrain/vision/augment.py", "width - 1 - columns", "width - columns"),
    Mutant("hvdtrain/vision/data.py", "fetch(name, folder) if comm.local_rank", "fetch(name, folder) if comm.rank"),
    Mutant("hvdtrain/feed/readers.py", "workers if self._ahead else 0", "workers"),
    Mutant("hvdtrain/vision/files.py", "dtype=torch.uint8), NO_LABEL", "dtype=torch.uint8), label"),
    Mutant(
        "hvdtrain/vision/headers.py", "images[comm.local_rank :: comm.local_size]", "images[comm.rank :: comm.size]"
    ),
    Mutant(
        "hvdtrain/vision/preprocessing.py", "0 < w <= width and 0 < h <= height", "0 < w <= width or 0 < h <= height"
    ),
    Mutant("hvdtrain/recipe/average.py", "config.epochs) * steps_per_epoch", "config.epochs)"),
    Mutant("hvdtrain/recipe/average.py", "max(layer.momentum, 1", "min(layer.momentum, 1"),
    Mutant("hvdtrain/feed/feed.py", "batch.stop <= position.visited", "batch.stop < position.visited"),
    Mutant("hvdtrain/recipe/sync_batch_norm.py", "count / (count - 1).clamp(min=1)", "count / count.clamp(min=1)"),
    Mutant("hvdtrain/recipe/sync_batch_norm.py", "own_mean = own_mean.double()", "pass"),
    Mutant("hvdtrain/recipe/sync_batch_norm.py", 'backward") / count)', 'backward") / unit[:, 0].numel())'),
    Mutant("hvdtrain/feed/feed.py", "if not split.reads_files:", "if split.reads_files:"),
    Mutant("hvdtrain/feed/feed.py", "tensor.record_stream(torch.cuda.current_stream(device))", "pass"),
    Mutant(
        "hvdtrain/loop/evaluation.py", "len(split) // group.size / micro_batch", "len(split) / group.size / micro_batch"
    ),
    Mutant("hvdtrain/tracking/recorder.py", "if run.tracker.is_writer:", "if True:"),
    Mutant("hvdtrain/recipe/optim.py", "1 - second_decay**step for", "1 - first_decay**step for"),
    Mutant(
        "hvdtrain/recipe/optim.py",
        "torch.zeros_like(parameter)\n    return optimizer",
        "torch.ones_like(parameter)\n    return optimizer",
    ),
    Mutant("hvdtrain/loop/limits.py", "self.skipped_in_a_row + 1 >=", "self.skipped_in_a_row >="),
    Mutant(
        "hvdtrain/core/step.py",
        "torch.where(self._skip == 0, self._latest, self._before)",
        "torch.where(self._skip != 0, self._latest, self._before)",
    ),
    Mutant("hvdtrain/feed/order.py", "size - 1 - seat", "size - seat"),
    Mutant("hvdtrain/feed/order.py", "math.ceil(samples / global_batch)", "samples // global_batch"),
    Mutant("hvdtrain/loop/reports.py", "rank, _ in self.gauges}) <= MOST", "rank, _ in self.gauges}) >= MOST"),
    Mutant("hvdtrain/recipe/schedule.py", "round(min(config.warmup_epochs", "round(max(config.warmup_epochs"),
    Mutant("hvdtrain/core/step.py", "follow(self.average, self._skip)", "follow(self.average, 0 * self._skip)"),
    Mutant(
        "hvdtrain/checkpoint/files.py",
        'in reversed(list_checkpoints(root, "step"))',
        'in list_checkpoints(root, "step")',
    ),
    Mutant("hvdtrain/checkpoint/folder.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
    Mutant("hvdtrain/loop/save_points.py", "bool(save or leave or by_steps)", "bool(save or by_steps)"),
    Mutant("hvdtrain/checkpoint/files.py", "if text is not None]", "if text is not None][:comm.rank]"),
    Mutant(
        "hvdtrain/checkpoint/saves.py",
        "files.load(checkpoint, files.rank_file_name(comm.rank))",
        "files.load(checkpoint, files.rank_file_name(0))",
    ),
    Mutant("hvdtrain/checkpoint/state.py", "(total / counts[index, name])", "total"),
    Mutant("hvdtrain/checkpoint/writer.py", "number < good", "number <= good"),
    Mutant("hvdtrain/checkpoint/writer.py", "[-self._keep[kind] :]", "[: self._keep[kind]]"),
    Mutant("hvdtrain/tracking/environment.py", "if names == [branch]", "if names"),
    Mutant("hvdtrain/tracking/files.py", "self._pending.popleft()", "self._pending.pop()"),
    Mutant("hvdtrain/tracking/run.py", "comm.wait_context = watch.collective", "pass"),
    Mutant("hvdtrain/tracking/tracker.py", "_started -= memory", "_started += memory"),
    Mutant("hvdtrain/tracking/peaks.py", "rank = max(range(", "rank = min(range("),
    Mutant("hvdtrain/profiling/clocks.py", "if self._started_steps > 0:", "if self._started_steps >= 0:"),
    Mutant("hvdtrain/profiling/passes.py", "self._unmeasured_steps[self.isolated])", "0)"),
    Mutant("hvdtrain/profiling/parts.py", 'min(isolated_s["sync"], *waits_s)', "min(waits_s)"),
    Mutant("hvdtrain/profiling/verdict.py", 'min(means.phases_s["sync"]', 'max(means.phases_s["sync"]'),
    Mutant("hvdtrain/ranks/comm.py", "self._mpi.allgather(text)", "[text] * self.size"),
    Mutant("hvdtrain/ranks/comm.py", 'op=hvd.Average, name="average"', 'op=hvd.Sum, name="average"'),
    Mutant("hvdtrain/ranks/device.py", "comm.size > 1 and not has_nccl()", "comm.size > 1 and has_nccl()"),
    Mutant("hvdtrain/ranks/links.py", "[ring[0], ring[-1], *ring[1:-1]]", "[ring[-1], *ring[:-1]]"),
    Mutant("hvdtrain/ranks/launchers.py", "int(tasks[0]) != len(node_tasks)", "int(tasks[0]) == len(node_tasks)"),
    Mutant("hvdtrain/core/replicas.py", "majority = max(peers", "majority = min(peers"),
    Mutant("hvdtrain/core/replicas.py", "4: torch.int32,", "4: torch.float32,"),
    Mutant("hvdtrain/ranks/distributed_optimizer.py", "op=hvd.Sum,", "op=hvd.Average,"),
    Mutant("hvdtrain/ranks/distributed_optimizer.py", "self._optimizer.synchronize()", "pass"),
    Mutant("hvdtrain/ranks/distributed_optimizer.py", "    del own.zero_grad", "    pass"),
    Mutant("hvdtrain/ranks/wire.py", "ranks.bit_length() - 1", "ranks.bit_length()"),
    Mutant("hvdtrain/ranks/wire.py", "self._scale /= 2", "self._scale *= 2"),
    Mutant("hvdtrain/ranks/buckets.py", "part.view.zero_()", "pass"),
    Mutant("hvdtrain/ranks/buckets.py", "elif part.passes_left > 0:", "elif part.passes_left > 1:"),
    Mutant(
        "hvdtrain/ranks/buckets.py",
        "self._broadcast_names([*self._arrival_order, *remaining])",
        "[*self._arrival_order, *remaining]",
    ),
    Mutant("hvdtrain/safety/exits.py", "os._exit(status)", "sys.exit(status)"),
    Mutant("hvdtrain/safety/guard.py", "-QUIET_S) < QUIET_S", "-QUIET_S) > QUIET_S"),
    Mutant("hvdtrain/safety/watchdog.py", "if self._reads_files else self._limit_s", "if False else self._limit_s"),
    Mutant("hvdtrain/safety/watchdog.py", "(limit_s, exit=True", "(limit_s, exit=False"),
    Mutant(
        "hvdtrain/compare/groups.py", "if run.settings and run.exit_reason == FINISHED else", "if run.settings else"
    ),
    Mutant("hvdtrain/compare/spread.py", "stdtrit(freedom, 0.975)", "stdtrit(freedom, 0.95)"),
    Mutant("hvdtrain/compare/study.py", "_broken_limits(study, size)][-1]", "_broken_limits(study, size)][0]"),
    Mutant("launch/cores.py", "runs[-1][-1] == core - 1", "runs[-1][-1] == core + 1"),
    Mutant("launch/cores.py", "int(match[1]) <= int(match[2]", "int(match[1]) < int(match[2]"),
    Mutant("launch/process.py", "128 - status if status < 0", "128 + status if status < 0"),
    Mutant("launch/process.py", "for number in (signal.SIGTERM, signal.SIGKILL)", "for number in (signal.SIGTERM,)"),
    Mutant("launch/process.py", "process.started_s < before_s", "process.started_s > before_s"),
    Mutant("launch/cli/main.py", "sys.exit(128 + number)", "sys.exit(number)"),
    Mutant("launch/cli/show.py", "if options.topology is None:", "if options.topology is not None:"),
    Mutant("launch/study/check.py", 'finding.severity == "error" for finding in self.findings', "self.findings"),
    Mutant("launch/study/sweep.py", "1 if missing or drawn.status else 0", "1 if missing else 0"),
    Mutant("launch/study/sweep.py", '"HVDLAUNCH_SEED": str(seed)', '"HVDLAUNCH_SEED": str(np)'),
    Mutant("launch/study/links.py", "len(slows) > 1 and all(slows)", "all(slows)"),
    Mutant("launch/study/links.py", "max(gbps, best.get(host, 0))", "gbps"),
    Mutant("launch/supervise/nccl_log.py", "int(match[3]) == rank", "int(match[2]) == rank"),
    Mutant("launch/supervise/failure.py", "in fired if not traces[rank].waited", "in fired if traces[rank].waited"),
    Mutant("launch/supervise/fleet.py", "slots = min(host.slots, free)", "slots = max(host.slots, free)"),
    Mutant("launch/supervise/restarts.py", "tally.failures > policy.restarts", "tally.failures >= policy.restarts"),
    Mutant("launch/start/environment.py", "bool(SECRET.search(name) or (", "bool(("),
    Mutant("launch/start/facts.py", "lambda host: not is_local(", "lambda host: is_local("),
    Mutant("launch/placement/findings.py", "(value != MISSING, len(", "(value == MISSING, len("),
    Mutant("launch/placement/gpu_findings.py", "elif free < slots.get(", "elif free > slots.get("),
    Mutant("launch/placement/slots.py", "if any(len(run) < parts", "if all(len(run) < parts"),
    Mutant("launch/placement/rings.py", "in enumerate(row) if weight >= floor", "in enumerate(row) if weight > floor"),
    Mutant("launch/placement/measured.py", "links.gb_per_s[place[gpu.index]]", "links.gb_per_s[place[other.index]]"),
    Mutant("launch/placement/selection.py", "self.measured or slowest < NVLINK", "slowest < NVLINK"),
    Mutant("launch/placement/selection.py", "-len({self.gpus[v].numa", "len({self.gpus[v].numa"),
    Mutant("launch/probe/ssh.py", "return answer.status == 0", "return answer.status != 0"),
    Mutant("launch/probe/host_facts.py", "else connection[2]", "else connection[0]"),
    Mutant("launch/machine/condition.py", "settings.setdefault(name.strip(), (", "settings[name.strip()] = (("),
    Mutant("launch/machine/nvidia_smi.py", 'mig=mig == "Enabled"', 'mig=mig != "Enabled"'),
    Mutant("launch/machine/nvidia_smi.py", "titles[1:] if len(tail)", "titles if len(tail)"),
    Mutant("launch/machine/system.py", "deepest <= 1", "deepest < 1"),
    Mutant("launch/machine/show/canvas.py", "text[: most - 1]", "text[:most]"),
    Mutant("launch/machine/show/table.py", "best = min(kinds", "best = max(kinds"),
    Mutant("launch/hosts/host.py", "host.max_slots < host.slots", "host.max_slots <= host.slots"),
    Mutant("launch/hosts/slurm.py", "for n in range(first, last + 1)", "for n in range(first, last)"),
    Mutant("launch/rank/forwarder.py", "_unended not in (None, stream)", "_unended is None"),
    Mutant("launch/rank/forwarder.py", "not show_all and request is None", "not show_all"),
    Mutant("launch/supervise/rank_logs.py", "| os.O_NOFOLLOW |", "|"),
    Mutant("launch/machine/system.py", "min(allowed, default=None)", "max(allowed, default=None)"),
    Mutant("launch/start/mpijob.py", "np % slots", "slots % np"),
    Mutant("hvdtrain/safety/limits.py", "int(quota) / int(period)", "int(period) / int(quota)"),
    Mutant("launch/rank/bind.py", "min(high, MAX_CORE) + 1", "min(high, MAX_CORE)"),
    Mutant("launch/rank/bind.py", "signal.SIG_BLOCK, {signal.SIGUSR1}", "signal.SIG_UNBLOCK, {signal.SIGUSR1}"),
]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # pytest is ended, too
    with tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
        unbroken = Path(folder)
        subprocess.run(["git", "clone", "--quiet", "--shared", Path(__file__).parents[1], unbroken], check=True)
        if wrong := [one for one in MUTANTS if (unbroken / one.file).read_text().count(one.original) != 1]:
            sys.exit("not exactly once in its file:\n" + "\n".join(map(str, wrong)))
        if options.check or options.out is None:
            return
        found = Findings(options.out)
        for mutant in MUTANTS:
            for stage in ["room", "whole"] if options.whole else ["room"]:
                if not found.is_known(mutant, stage):
                    found.add(mutant, stage, unbroken)
        print(table(found))


class Findings:
    """What is known of each break, in a file of JSON lines: the test that failed at a stage, or None."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {(Mutant(*line["mutant"]), line["stage"]): line["failed"] for line in map(json.loads, lines)}

    def failed(self, mutant: Mutant, stage: str) -> str | None:
        """The test that has found it at this stage."""
        return self.known.get((mutant, stage))

    def is_known(self, mutant: Mutant, stage: str) -> bool:
        """Whether it need not run: it has run already, or was found before."""
        return (mutant, stage) in self.known or self.failed(mutant, "room") is not None

    def add(self, mutant: Mutant, stage: str, project: Path) -> None:
        """Run the tests of this stage on a broken copy of the project, and before that once on an unbroken one."""
        tests = UNIT_TESTS.get(mutant.room, (f"tests/unit/{mutant.room}",)) if stage == "room" else WHOLE
        limit_s = ROOM_S if stage == "room" else WHOLE_S
        unbroken = Mutant("", "", " ".join(tests))
        for one in (unbroken, mutant):
            if (one, stage) in self.known:
                continue
            with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
                copy = shutil.copytree(project, Path(folder) / "copy", symlinks=True)
                if one is mutant:
                    path = copy / mutant.file
                    path.write_text(path.read_text().replace(mutant.original, mutant.replacement))
                failed = first_failed(copy, tests, limit_s)
            if one is unbroken and failed is not None:
                sys.exit(f"unbroken, {failed} fails: see to that first")
            self.known[one, stage] = failed
            with self.file.open("a") as out:
                out.write(json.dumps({"mutant": list(one), "stage": stage, "failed": failed}) + "\n")
            print(f"{one.file or 'unbroken'} {one.replacement.strip()}: {failed or 'passed'}", flush=True)


def first_failed(copy: Path, tests: tuple[str, ...], limit_s: float) -> str | None:
    """The first test that fails in this copy, None if all pass."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
    with tempfile.TemporaryFile("w+") as output:  # not a pipe, which what a test has left behind would keep open
        process = subprocess.Popen(
            words, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s} s"
        finally:
            _end(process)
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    return (failed[1] if failed else f"pytest ended with status {status}") if status else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End pytest as Ctrl-C does, so that it ends what its tests have started; then for certain."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


def table(found: Findings) -> str:
    """By room how many breaks were found, as Markdown, and those that were not."""
    lines = ["| room | breaks | found by its unit tests | by the whole suite | not found |", "|---|--:|--:|--:|--:|"]
    rooms = {mutant.room: [one for one in MUTANTS if one.room == mutant.room] for mutant in MUTANTS}
    for room, mutants in {**rooms, "all": MUTANTS}.items():
        counts = [sum(found.failed(one, stage) is not None for one in mutants) for stage in ("room", "whole")]
        lines.append(f"| {room} | {len(mutants)} | {counts[0]} | {counts[1]} | {len(mutants) - sum(counts)} |")
    lines += ["", f"{100 * sum(counts) / len(MUTANTS):.0f} % found. Not found:", ""]
    for one in MUTANTS:
        if not any(found.failed(one, stage) for stage in ("room", "whole")):
            tried = "the whole suite" if (one, "whole") in found.known else "its unit tests"
            lines.append(f"- {one.file}: `{one.original.strip()}` -> `{one.replacement.strip()}`, not by {tried}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
