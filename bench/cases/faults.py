"""Twelve faults, compared with every peer: real processes, and verdicts from exit statuses, files and outputs.

Each side is a program of bench/peers/, written as its documentation recommends, that trains the same small network.
Everything runs in namespaces that end with the case. Runs are kept in build/bench/faults/, so a case that was cut off
continues, and a changed verdict needs no new runs. Earlier runs of a peer that is not chosen count; --fresh drops those
of the chosen ones.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from bench.jobs import NAMESPACES
from bench.pairs import RESULTS, Case, Table
from bench.survival import HOSTS, NIC, SIDES, Run, Side, Verdict, end_all
from tests.cluster import hosts

FAULTS = {
    "kill": "a rank killed",
    "hang": "a rank that hangs",
    "extra": "one extra collective on one rank",
    "nan": "NaN on one rank",
    "term": "SIGTERM to the job",
    "save": "a rank killed during a save",
    "torn": "a torn checkpoint",
    "disk": "a full disk",
    "late": "a listing that one rank sees late",
    "data": "data that differ by rank",
    "slow": "a slow rank",
    "host": "a host lost",
}
CULPRITS: dict[str, int | str] = {"save": 0, "disk": "No space left on device"}  # of others rank 1
NOBODY = ("term", "late")
FROM_A_CHECKPOINT = ("torn", "late")
OURS = "hvdtrain"
STEP, SAVED, KILLED = 25, 25, 35  # of a fault from outside; of the run that is resumed: an old listing, and its end
COLUMNS = ("n", "survived", "on again, s", "steps lost", "culprit named", "weights equal")
ENDS = {"yes": "✓", "no": "ends"}
KEPT = RESULTS.resolve() / "faults"
IN_NAMESPACES = "mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /dev/shm; ip link set lo up; hostname localhost"


def resumable(side: Side, folder: Path) -> Path:
    """Return the folder of a run that was killed between saves, with its files as an old listing has them."""
    if not folder.exists():
        run = Run(side, "", folder.with_name("unfinished"))
        run.prepare()

        def watch(run: Run) -> None:
            if run.last_step() >= SAVED and not (run.notes / "old").exists():
                shutil.copytree(run.work, run.notes / "old", symlinks=True)
            if run.last_step() >= KILLED:
                end_all()

        run.command(watch)
        end_all()
        run.folder.rename(folder)
    return folder


def tear(run: Run) -> None:
    """Cut the largest file of the newest checkpoint in half, and note its name."""
    newest = max(run.work.glob(run.side.checkpoints), key=lambda path: path.stat().st_mtime)
    files = [path for path in (newest, *newest.rglob("*")) if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    (run.notes / "torn").write_text(str(largest.relative_to(run.work)))
    run.strike()


def terminate(run: Run) -> None:
    """Send SIGTERM once to what the user has started."""
    if run.last_step() >= STEP and run.strike():
        run.job.send_signal(signal.SIGTERM)


def lose_host(run: Run) -> None:
    """Drop all packets from and to the second host."""
    assert run.cluster is not None
    if run.last_step() >= STEP and run.strike():
        run.cluster.silence(HOSTS[1])


def inflict(side: Side, fault: str, folder: Path) -> None:
    """Run the program with the fault; if it does not come to its end, repair the fault and repeat the command."""
    run = Run(side, fault, folder.with_name(f"{folder.name}-now"))
    run.prepare(resumable(side, folder.with_name("resumable")) if fault in FROM_A_CHECKPOINT else None)
    if fault == "torn":
        tear(run)
    if fault == "host":
        hosts.NICS = (NIC,)  # type: ignore[assignment]
        (run.folder / "cluster").mkdir()
        with hosts.Cluster(run.folder / "cluster") as run.cluster:
            run.command(lose_host)
    elif not (run.command(terminate) if fault == "term" else run.command()) and fault not in ("", "torn", "nan"):
        end_all()
        (run.work / "filler").unlink(missing_ok=True)
        (run.notes / "repaired").touch()
        run.command()
    end_all()
    if fault == "disk":
        subprocess.run(["umount", "-l", run.work], check=True)
    shutil.rmtree(run.work)
    run.folder.rename(folder)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The results of a side for a fault: a value of each run."""

    survived: list[str]
    seconds: list[float | None]
    lost: list[int | None]
    named: list[str]
    equal: list[str]

    @classmethod
    def of(cls, side: Side, fault: str, folders: Sequence[Path]) -> "Cell":
        """Judge the runs in these folders."""
        verdicts = [Verdict(side, fault, folder) for folder in folders]
        undisturbed = Verdict(side, "", folders[0].with_name("undisturbed-0")).weights[0]
        torn: list[int | str] = [
            Path(file.read_text()).name for folder in folders for file in folder.glob("notes/torn")
        ]
        culprits = torn or [CULPRITS.get(fault, 1)] * len(folders)
        went_on, equal = [verdict.went_on() for verdict in verdicts], [each.equal(undisturbed) for each in verdicts]
        # With other weights than any resumed run has it began again, whatever step it counted from.
        has_resumed = [not (fault in FROM_A_CHECKPOINT and weights == "no") for weights in equal]
        return cls(
            survived=[verdict.survived for verdict in verdicts],
            seconds=[seconds for seconds, _ in went_on],
            lost=[lost if resumed else None for (_, lost), resumed in zip(went_on, has_resumed, strict=True)],
            named=[
                "" if fault in NOBODY else verdict.named(culprit)
                for verdict, culprit in zip(verdicts, culprits, strict=True)
            ],
            equal=equal,
        )

    def columns(self) -> list[Any]:
        """Return the cells of the table: medians, and verdicts with their numbers if they are not all the same."""
        of_numbers = [_median(self.seconds), _median(self.lost)]
        return [len(self.survived), _verdicts(self.survived), *of_numbers, _verdicts(self.named), _verdicts(self.equal)]

    def text(self) -> str:
        """Return the verdicts in a few words."""
        _, survived, _, _, named, equal = self.columns()
        words = [ENDS.get(survived, survived), {"yes": "named", "no": ""}.get(named, named)]
        return ", ".join(filter(None, words)) + {"yes": "", "": ""}.get(equal, " ≠")

    def scores(self) -> dict[str, float]:
        """Return the worst of its runs for each verdict, more being better."""
        return {
            "survived": min({"yes": 2, "refused": 2, "again": 1}.get(value, 0) for value in self.survived),
            "steps lost": -max(999 if value is None else value for value in self.lost),
            "culprit named": min(value == "yes" for value in self.named),
            "weights equal": min({"yes": 2, "rounded": 1}.get(value, 0) for value in self.equal),
        }


def better(one: Cell, other: Cell) -> list[str]:
    """Return the verdicts in which one is better than the other."""
    theirs = other.scores()
    return [name for name, score in one.scores().items() if score > theirs[name]]


def _verdicts(values: Sequence[str]) -> str:
    counts = Counter(values)
    if len(counts) == 1:
        return values[0]
    return ", ".join(f"{value or 'none'} {count} of {len(values)}" for value, count in counts.items())


def _median(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, middle, high = (round(value, 1) for value in (min(known), statistics.median(known), max(known)))
    return {"median": middle, "low": low, "high": high, "n": len(known)}


COUNTED: dict[str, Callable[[Cell], bool]] = {  # in all of its runs
    "ends well by itself, or is refused": lambda cell: set(cell.survived) <= {"yes", "refused"},
    f"culprit named, of {len(FAULTS) - len(NOBODY)}": lambda cell: set(cell.named) == {"yes"},
    "same weights": lambda cell: set(cell.equal) == {"yes"},
}


def run_all(chosen: argparse.Namespace) -> None:
    """Run the chosen cells that have not been run."""
    for name in chosen.sides:
        if chosen.fresh:
            shutil.rmtree(_kept(name), ignore_errors=True)
        (_kept(name)).mkdir(parents=True, exist_ok=True)
    rounds = [["undisturbed", *chosen.faults], *([chosen.faults] * (chosen.n - 1))]
    for (number, of_round), name in product(enumerate(rounds), chosen.sides):
        for fault in of_round:
            if not (folder := _kept(name) / f"{fault}-{number}").exists():
                inflict(SIDES[name], "" if fault == "undisturbed" else fault, folder)
                verdict = Verdict(SIDES[name], fault, folder)
                print(name, folder.name, verdict.survived, flush=True)
                if not (verdict.is_finished if fault == "undisturbed" else (folder / "notes" / "struck").exists()):
                    folder.rename(folder.with_name(f"{folder.name}-now"))
                    sys.exit(f"{name}: it ended before the fault struck: see {folder}-now, and repeat the command")


def faults(chosen: argparse.Namespace) -> Table:
    """Twelve faults against hvdtrain, torchrun, Accelerate, Lightning, DeepSpeed and Elastic Horovod, each n times.

    Needs root, and .venv-peers: `scripts/setup.sh peers`, then `.venv-peers/bin/python bench/run.py faults`.
    """
    if os.getpid() != 1:
        words = [*NAMESPACES.split(), "sh", "-ec", f'{IN_NAMESPACES}; exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvp(words[0], words)  # noqa: S606 (the same program, in namespaces)
    run_all(chosen)
    cells = {(fault, name): cell for fault in FAULTS for name in SIDES if (cell := _cell(fault, name)) is not None}
    sides = [name for name in SIDES if any((fault, name) in cells for fault in FAULTS)]
    conditions = {name: f"{version(SIDES[name].package)}, {SIDES[name].lines} lines" for name in sides}
    question, sizes = "Twelve faults of a training on 2 ranks", sorted({len(cell.survived) for cell in cells.values()})
    n = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    table = Table(name="faults-peers", question=question, columns=["fault", "tool", *COLUMNS], conditions=conditions)
    short = Table(name="faults-summary", question=question, columns=["fault", *sides], conditions={"n =": n})
    columns = ["tool", *COUNTED, "lines for faults"]
    counts = Table(name="faults-counts", question=question, columns=columns, conditions={"n =": n})
    for fault, text in FAULTS.items():
        of_fault = {name: cells[fault, name] for name in sides if (fault, name) in cells}
        for name, cell in of_fault.items():
            table.add(text, name, *cell.columns())
            if name != OURS and OURS in of_fault and (found := better(cell, of_fault[OURS])):
                print(f"{text}: {name} is better: {', '.join(found)}")
        short.add(text, *(of_fault[name].text() if name in of_fault else None for name in sides))
    ours = {fault: cells[fault, OURS] for fault in FAULTS if (fault, OURS) in cells}
    if len(cells) == len(FAULTS) * len(SIDES):
        peers = [name for name in SIDES if name != OURS]
        alone = [
            all(
                better(ours[fault], cells[fault, name]) and not better(cells[fault, name], ours[fault])
                for name in peers
            )
            for fault in FAULTS
        ]
        table.conditions["handled by hvdtrain as by no other"] = f"{sum(alone)} of {len(FAULTS)}"
    for name in sides:
        of_side = [cells[fault, name] for fault in FAULTS if (fault, name) in cells]
        counts.add(name, *(sum(is_good(cell) for cell in of_side) for is_good in COUNTED.values()), SIDES[name].lines)
    short.write()
    counts.write()
    return table


def _kept(name: str) -> Path:
    return KEPT / name.replace(" ", "-")  # sshd takes no name with a blank


def _cell(fault: str, name: str) -> Cell | None:
    folders = sorted((_kept(name)).glob(f"{fault}-?"))
    return Cell.of(SIDES[name], fault, folders) if folders else None


CASES = {"faults": Case(measure=faults, options={"sides": list(SIDES), "faults": list(FAULTS), "n": 3, "fresh": False})}
