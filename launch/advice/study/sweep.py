"""One program at several sizes, each run like by `hvdlaunch run`; then hvdtrain.compare writes the table.

The program gets HVDLAUNCH_JOB, a name for its run folder, and HVDLAUNCH_SEED. The state of the study is in
sweeps/<name>/sweep.json.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launch.advice.study import record
from launch.documents import Document
from launch.errors import CommandError, LaunchError, ProcessError, harmless, in_one_line
from launch.output import print_line
from launch.process import Answer, ask
from launch.run.start.keepers import Keepers
from launch.run.start.prepare import prepare
from launch.run.start.request import RunRequest
from launch.run.supervise.run import run

DRAW_S = 600.0
MAX_WHY = 1000  # characters; ssh may print many lines


@dataclass(frozen=True, kw_only=True)
class Study:
    """The runs of a study, and the limits for its table."""

    request: RunRequest  # its np is replaced by each size
    sizes: tuple[int, ...]  # ranks
    seeds: int
    mode: Literal["weak", "strong"]  # what the program keeps constant: the batch per rank, or the global batch
    name: str | None
    price_per_gpu_hour: float | None
    target: float | None  # of the task's best metric
    min_efficiency: float | None  # percent
    max_accuracy_loss: float | None  # percentage points


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One run of the study."""

    np: int
    seed: int
    status: int  # 2 if it could not be started
    run_folder: str | None
    why: str | None  # why it has no result, in one line


Rows = dict[tuple[int, int], SweepRow]  # by size and seed


def sweep(study: Study, environment: Mapping[str, str]) -> int:
    """Run everything without a result, small sizes first; return 0 if it succeeds, else 1.

    Success means that every run has a result and the table is written. Return 128 + signal after a signal. LaunchError
    for bad input, or if the first run cannot be started.
    """
    check(study)
    with (
        record.held_folder("sweeps", study.name, study.mode, settings(study, environment)) as folder,
        Keepers(after_run=True) as keepers,
    ):
        return _sweep(study, environment, folder / "sweep.json", keepers)


def _sweep(study: Study, environment: Mapping[str, str], file: Path, keepers: Keepers) -> int:
    rows: Rows = {(row.np, row.seed): row for row in record.read(file, settings(study, environment), "runs", _row)}
    planned = [(np, seed) for np in sorted(study.sizes) for seed in range(study.seeds)]
    printed: set[str] = set()
    for number, (np, seed) in enumerate(planned, start=1):
        title = f"np {np} seed {seed} ({number} of {len(planned)})"
        if (before := rows.get((np, seed))) is not None and why_no_result(before) is None:
            _say(f"{title}: finished before, {before.run_folder}")
        else:
            if number > 1 and seed == 0:
                draw(file)  # intermediate results, for users who do not want to wait
            _say(title)
            name = f"{file.parent.name}-np{np}-seed{seed}"
            own = {**environment, "HVDLAUNCH_JOB": name, "HVDLAUNCH_SEED": str(seed)}
            row, stopped = _run_once(study, file, rows, keepers, np=np, seed=seed, environment=own, printed=printed)
            _require_own_folder(row, rows)
            rows[np, seed] = row
            write(file, study, rows, environment)
            if stopped:
                return row.status or 1  # it has saved, but is not finished
        if study.seeds > 1:
            _warn_seed_ignored(rows[np, seed], printed)
    write(file, study, rows, environment)  # with the current price and limits
    drawn = draw(file)
    print(drawn.out, end="", flush=True)
    if drawn.err:
        print_line(drawn.err.removesuffix("\n"))
    missing = sum(why_no_result(rows[key]) is not None for key in planned)
    if missing:
        _say(f"error: {missing} of {len(planned)} runs have no result. Run the same command again to retry them.")
    return 1 if missing or drawn.status else 0


def check(study: Study) -> None:
    """Raise CommandError for invalid numbers."""
    if study.seeds < 1:
        raise CommandError(f"--seeds {study.seeds}: at least 1 run of each size is needed")
    if study.price_per_gpu_hour is not None and not 0 <= study.price_per_gpu_hour < math.inf:
        raise CommandError(f"--price-per-gpu-hour {study.price_per_gpu_hour:g}: pass a number of at least 0")
    if study.target is not None and not math.isfinite(study.target):
        raise CommandError(f"--target {study.target:g}: pass a number, such as 95 for an accuracy of 95 %")
    percent = study.min_efficiency
    if percent is not None and not 1 < percent <= 100:
        raise CommandError(f"--min-efficiency {percent:g}: pass a percentage above 1 and up to 100, such as 95")
    if study.max_accuracy_loss is not None and not 0 <= study.max_accuracy_loss <= 100:
        raise CommandError(f"--max-accuracy-loss {study.max_accuracy_loss:g}: pass percentage points, 0 to 100")


def settings(study: Study, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that must be equal for all rows of a table."""
    return {"program": list(study.request.program), "mode": study.mode, **record.of_request(study.request, environment)}


def _row(run: Document) -> SweepRow:
    return SweepRow(
        np=run.whole("np", 1),
        seed=run.whole("seed", 0),
        status=run.whole("status", 0, 255),
        run_folder=run.optional_text("run_folder"),
        why=run.optional_text("why"),
    )


def write(file: Path, study: Study, rows: Rows, environment: Mapping[str, str]) -> None:
    """Write the study, with rows of earlier sizes and seeds; LaunchError if that fails."""
    known = {
        **settings(study, environment),
        "sizes": sorted({*study.sizes, *(np for np, _ in rows)}),
        "seeds": max([study.seeds, *(seed + 1 for _, seed in rows)]),
        "price_per_gpu_hour": study.price_per_gpu_hour,
        "target": study.target,
        "min_efficiency": study.min_efficiency,
        "max_accuracy_loss": study.max_accuracy_loss,
        "runs": [asdict(rows[key]) for key in sorted(rows)],
    }
    record.write(file, known)


def _run_once(
    study: Study,
    file: Path,
    rows: Rows,
    keepers: Keepers,
    *,
    np: int,
    seed: int,
    environment: Mapping[str, str],
    printed: set[str],
) -> tuple[SweepRow, bool]:
    """Return the row of one run, and whether a signal stopped it; LaunchError if the first run cannot be started."""
    try:
        prepared = prepare(replace(study.request, np=np, attempt=keepers.attempt), environment, Path.cwd())
        write(file, study, rows, environment)  # a file that cannot be written should be detected before a long run
        for remark in prepared.plan.remarks:
            _print_once(f"hvdlaunch: {remark}", printed)
        result = run(prepared, keepers=keepers)
    except LaunchError as error:
        if not rows:
            raise
        lines = [in_one_line(error), *map(harmless, error.details)]
        _say("\n    ".join([f"error: np {np} seed {seed} cannot be started: {lines[0]}", *lines[1:]]))
        why = "; ".join(map(str.strip, lines))[:MAX_WHY]
        return SweepRow(np=np, seed=seed, status=error.status, run_folder=None, why=why), False
    row = SweepRow(np=np, seed=seed, status=result.status, run_folder=result.run_folder, why=result.why)
    reason = why_no_result(row)
    if row.status == 0 and reason is not None:
        _say(f"warning: np {np} seed {seed} has no result: {reason}")
    return replace(row, why=reason), result.stopped


def why_no_result(row: SweepRow) -> str | None:
    """Explain why this run has no result, as far as visible now; None if it has one."""
    if row.status:
        return row.why or f"it ended with status {row.status}"
    if row.run_folder is None:
        return "the program told no run folder: it must write it, as hvdtrain does, to the file in HVDLAUNCH_REPORT"
    reason = record.read_json(Path(row.run_folder) / "result.json").get("exit_reason")
    if reason is None:
        return f"no result.json with an exit_reason in {row.run_folder}"
    return None if reason == "finished" else f"it ended before it was finished: {reason}"


def _require_own_folder(row: SweepRow, rows: Rows) -> None:
    """Raise LaunchError if a run has replaced the run folder of another one, whose result is lost."""
    for (np, seed), other in rows.items():
        if other.run_folder is not None and other.run_folder == row.run_folder and (np, seed) != (row.np, row.seed):
            raise LaunchError(
                f"np {row.np} seed {row.seed} has replaced the run folder of np {np} seed {seed}, {row.run_folder}: "
                "leave the name of the run out of the program's options"
            )


def _warn_seed_ignored(row: SweepRow, printed: set[str]) -> None:
    seed = None if row.run_folder is None else record.read_json(Path(row.run_folder) / "config.json").get("seed")
    if seed not in (None, row.seed):
        line = f"the program takes seed {seed} for every run, their spread means nothing: leave it out of its options"
        _print_once(f"sweep: warning: {line}", printed)


def draw(file: Path) -> Answer:
    """Let hvdtrain.compare write the current table; return its output."""
    try:
        return ask([sys.executable, "-m", "hvdtrain.compare", "--sweep", str(file)], timeout_s=DRAW_S)
    except ProcessError as error:
        return Answer(status=1, out="", err=f"sweep: error: no table: {error}\n")


def _say(text: str) -> None:
    print_line(f"sweep: {text}")


def _print_once(line: str, printed: set[str]) -> None:
    if line not in printed:
        print_line(line)
    printed.add(line)
