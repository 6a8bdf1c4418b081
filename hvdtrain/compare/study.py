"""The numbers of a scaling study: one program at several sizes, what each size gave, and which one to take.

Speed-up of N ranks: images/s of N over images/s of the smallest measured size, times that size's ranks. Efficiency:
speed-up over N. Hours are ranks x wall time of one run, without the launcher's start.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.compare import groups
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.groups import Group
from hvdtrain.compare.runs import FINISHED, Run
from hvdtrain.compare.spread import Mean, difference, mean_of
from hvdtrain.safety.exits import BadInput

# What follows from the number of ranks: no reason to call two sizes different programs.
_OF_THE_SIZE = {"np", "hosts", "device", "global_batch", "batch_size_per_rank", "accumulate_steps", "steps_per_epoch",
    "peak_lr"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    """What the runs of one number of ranks gave."""

    np: int
    group: Group | None  # the finished runs; None if there are none
    lacking: tuple[str, ...]  # why the others have no result
    target: float | None  # accuracy to reach, 0 to 1
    price: float | None  # for an hour of one rank

    @property
    def runs(self) -> tuple[Run, ...]:
        return () if self.group is None else self.group.runs

    @property
    def speed(self) -> Mean | None:
        """Images/s."""
        return None if self.group is None else self.group.mean("train_images_per_s")

    @property
    def time_s(self) -> Mean | None:
        return None if self.group is None else self.group.mean("wall_time_s")

    @property
    def accuracy(self) -> Mean | None:
        """Percent."""
        return None if self.group is None else self.group.accuracy()

    @property
    def steps(self) -> Mean | None:
        return None if self.group is None else self.group.mean("steps")

    @property
    def hours(self) -> float | None:
        """Of all ranks together, for one run."""
        return None if self.time_s is None else self.np * self.time_s.mean / 3600

    @property
    def cost(self) -> float | None:
        """Of one run."""
        return None if self.hours is None or self.price is None else self.hours * self.price

    def to_target_s(self) -> list[float | None]:
        """Of each run the time of the first evaluation that reached the target; None where none did."""
        assert self.target is not None
        reached = [[one for one in run.curve("eval/accuracy") if one.value >= self.target] for run in self.runs]
        return [points[0].seconds if points else None for points in reached]

    def images_per_step(self) -> float | None:
        """The global batch."""
        found = {run.number("global_batch") for run in self.runs}
        return found.pop() if len(found) == 1 else None

    def remark(self) -> str:
        """Why runs have no result; empty if all have."""
        if not self.lacking:
            return ""
        some = f"{len(self.lacking)} of {len(self.runs) + len(self.lacking)} runs: " if self.runs else ""
        return some + "; ".join(dict.fromkeys(self.lacking))


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep.json, and the run folders it names."""

    name: str
    program: str
    mode: str  # weak or strong
    sizes: tuple[Size, ...]  # rising
    target_percent: float | None
    price: float | None
    min_efficiency: float | None  # percent
    max_loss: float | None  # percentage points

    @property
    def measured(self) -> list[Size]:
        return [size for size in self.sizes if size.speed is not None]

    @property
    def on_gpus(self) -> bool:
        return any(run.on_gpus for size in self.sizes for run in size.runs)

    def speed_up(self, size: Size) -> float | None:
        """Against the smallest measured size, counted as its ranks."""
        if size.speed is None:
            return None
        base = self.measured[0]
        assert base.speed is not None
        return base.np * size.speed.mean / base.speed.mean

    def efficiency(self, size: Size) -> float | None:
        """Percent."""
        found = self.speed_up(size)
        return None if found is None else 100 * found / size.np


def read(file: Path, complaints: list[str]) -> Study:
    """The study of this sweep.json; BadInput if it is none, a line in `complaints` for what its runs lack."""
    try:
        known = json.loads(file.read_bytes())
        planned = {int(np) for np in known["sizes"]} | {int(row["np"]) for row in known["runs"]}
        rows = [dict(row) for row in known["runs"]]
        numbers = {
            name: None if known.get(name) is None else float(known[name])
            for name in ("price_per_gpu_hour", "target_accuracy", "min_efficiency", "max_accuracy_loss")
        }
        program, mode = " ".join(map(str, known["program"])), str(known["mode"])
    except OSError as error:
        raise BadInput(f"{file} cannot be read ({error.strerror}): give the sweep.json of a study") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is not the sweep.json of a study ({error!r}): run hvdlaunch sweep again") from error
    target = numbers["target_accuracy"]
    sizes = [
        _size(
            np,
            [row for row in rows if row["np"] == np],
            target=None if target is None else target / 100,
            price=numbers["price_per_gpu_hour"],
            complaints=complaints,
        )
        for np in sorted(planned)
    ]
    return Study(
        name=file.resolve().parent.name,
        program=program,
        mode=mode,
        sizes=tuple(sizes),
        target_percent=target,
        price=numbers["price_per_gpu_hour"],
        min_efficiency=numbers["min_efficiency"],
        max_loss=numbers["max_accuracy_loss"],
    )


def _size(
    np: int, rows: Sequence[dict[str, Any]], *, target: float | None, price: float | None, complaints: list[str]
) -> Size:
    runs, lacking = [], [] if rows else ["not run yet"]
    for row in rows:
        folder = Path(row["run_folder"]) if row.get("run_folder") else None
        known = folder is not None and (folder / "result.json").is_file()
        run = runfolder.read(folder, complaints) if folder is not None and known else None
        if (why := _lacks(row, folder, run, np)) is not None:
            lacking.append(why)
        elif run is not None:
            runs.append(run)
    together = groups.grouped(runfolder.with_own_names(runs))
    if len(together) > 1:
        lacking += [f"not averaged, for they differ in {', '.join(groups.differing(runs)) or 'what is unknown'}"]
        together = []
    return Size(
        np=np,
        group=Group(name=f"{np} rank{'' if np == 1 else 's'}", runs=together[0].runs) if together else None,
        lacking=tuple(lacking),
        target=target,
        price=price,
    )


def _lacks(row: dict[str, Any], folder: Path | None, run: Run | None, np: int) -> str | None:
    """Why this run has no result; None if it has one."""
    if row.get("status") or row.get("why"):
        return str(row.get("why") or f"it ended with status {row['status']}")
    if folder is None:
        return "it named no run folder"
    if run is None or not run.result:
        return f"no result.json that can be read in {folder}"
    if run.ended != FINISHED:
        return f"it ended before it was finished: {run.ended}"
    if run.number("np") != np:
        return f"{folder} holds a run of {run.result.get('np')} ranks: another run has replaced this one"
    return None


def remarks(study: Study) -> list[str]:
    """What breaks the comparison over sizes, and the differences in accuracy held against the spread over seeds."""
    lines = [line for line in (_not_kept(study), _other_settings(study)) if line]
    lines += groups.remarks([size.group for size in study.sizes if size.group is not None])
    return lines


def _not_kept(study: Study) -> str | None:
    """The sizes whose batch is not what the mode says."""
    if study.mode not in ("weak", "strong") or not study.measured:
        return None
    part = {size.np: (size.images_per_step() or math.nan) / (size.np if study.mode == "weak" else 1)
        for size in study.measured}  # fmt: skip
    first, usual = next(iter(part.items()))
    wrong = [f"{np} ranks had {value:g}" for np, value in part.items() if value != usual]
    what = "images per rank and step" if study.mode == "weak" else "images per step"
    if not wrong:
        return None
    return f"Not {study.mode} scaling: {', '.join(wrong)} {what}, {first} rank{'' if first == 1 else 's'} {usual:g}."


def _other_settings(study: Study) -> str | None:
    runs = [run for size in study.measured for run in size.runs]
    other = [name for name in groups.differing(runs) if name not in _OF_THE_SIZE]
    values = [f"{name} ({', '.join(dict.fromkeys(run.settings.get(name, '-') for run in runs))})" for name in other]
    return f"The sizes differ in more than their ranks: {'; '.join(values)}." if values else None


def advice(study: Study) -> list[str]:
    """The largest size inside the limits, why larger ones are not, and the next doubling; one line each."""
    if not study.measured:
        return ["No size has a result yet: nothing can be advised."]
    best = advised(study)
    if best is None:
        lines = ["No size is advised without limits: give --min-efficiency, --max-accuracy-loss or both."]
    else:
        lines = _inside_limits(study, best)
    return lines + [line for line in [_next_doubling(study)] if line]


def advised(study: Study) -> Size | None:
    """The largest size inside the limits; None without limits or results."""
    if not study.measured or (study.min_efficiency is None and study.max_loss is None):
        return None
    return [size for size in study.measured if not _breaks(study, size)][-1]  # the smallest always is


def _inside_limits(study: Study, best: Size) -> list[str]:
    broken = {size.np: _breaks(study, size) for size in study.measured}
    limits = [f"an efficiency of at least {study.min_efficiency:g} %"] if study.min_efficiency is not None else []
    if study.max_loss is not None:
        limits.append(f"an accuracy loss of at most {_points(study.max_loss)}")
    here = f"{study.efficiency(best):.1f} %{_lost(study, best)}"
    lines = [f"Advice: {_ranks(best.np)}, the largest size with {' and '.join(limits)} ({here})."]
    lines += [f"{_ranks(np)}: {', '.join(reasons)}." for np, reasons in broken.items() if reasons]
    return lines


def _breaks(study: Study, size: Size) -> list[str]:
    """The limits that a size breaks, in words."""
    reasons = []
    efficiency = study.efficiency(size)
    if study.min_efficiency is not None and efficiency is not None and efficiency < study.min_efficiency:
        reasons.append(f"efficiency {efficiency:.1f} % is below {study.min_efficiency:g} %")
    base = study.measured[0].accuracy
    if study.max_loss is not None and size is not study.measured[0]:
        if base is None or size.accuracy is None:
            reasons.append("its accuracy is not known")
        elif base.mean - size.accuracy.mean > study.max_loss:
            says = {
                "inside": ", though inside the spread over seeds",
                "outside": "",
                "unknown": ", though the spread over seeds is not known",
            }[difference(size.accuracy, base).says]
            lost = base.mean - size.accuracy.mean
            reasons.append(f"its accuracy is {lost:.2f} points lower, the limit is {study.max_loss:g}{says}")
    return reasons


def _lost(study: Study, size: Size) -> str:
    base = study.measured[0]
    if size is base or base.accuracy is None or size.accuracy is None:
        return ""
    return f", {size.accuracy.mean - base.accuracy.mean:+.2f} points against {_ranks(base.np)}"


def _next_doubling(study: Study) -> str | None:
    """Twice the largest size, by the power law through the last two; None with fewer than two."""
    if len(study.measured) < 2:
        return None
    before, last = study.measured[-2:]
    doublings = math.log2(last.np / before.np)
    assert before.speed is not None
    assert last.speed is not None
    efficiency = study.efficiency(last)
    assert efficiency is not None
    gain = (last.speed.mean / before.speed.mean) ** (1 / doublings)
    told = [f"efficiency about {efficiency * gain / 2:.0f} %"]
    if before.time_s is not None and last.time_s is not None and last.hours is not None:
        time_s = last.time_s.mean * (last.time_s.mean / before.time_s.mean) ** (1 / doublings)
        hours = 2 * last.np * time_s / 3600
        told.insert(0, f"about {time_s:.3g} s in place of {last.time_s.mean:.3g}")
        told.append(f"{hours:.2g} {'GPU' if study.on_gpus else 'rank'}-hours in place of {last.hours:.2g}")
        if study.price is not None and last.cost is not None:
            told.append(f"cost {hours * study.price:.3g} in place of {last.cost:.3g}")
    return f"The next doubling, {_ranks(2 * last.np)}: {', '.join(told)}; extrapolated from {before.np} and {last.np}."


def _points(number: float) -> str:
    return f"{number:g} point{'' if number == 1 else 's'}"


def _ranks(np: int) -> str:
    return f"{np} rank{'' if np == 1 else 's'}"


def mean_time_to_target(size: Size) -> Mean | None:
    """Seconds, over the runs, if all of them have reached it."""
    times = size.to_target_s()
    known = [time for time in times if time is not None]
    return mean_of(known) if len(known) == len(times) else None
