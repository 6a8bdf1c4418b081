"""Compare run folders: their settings, their results, and whether results differ by more than the spread over seeds.

    python -m hvdtrain.compare runs/effnet                       all runs below, into ./comparison
    python -m hvdtrain.compare runs/effnet/a runs/effnet/b --out /tmp/ab
    python -m hvdtrain.compare --sweep sweeps/NAME/sweep.json    the table and picture of a scaling study

Runs that differ only in the seed are one row, mean +- standard deviation. The other rows are compared with the first
finished one, by the rule in hvdtrain.compare.spread. Writes table.md, table.csv, curves.png and report.html with all
columns, and prints at most ten of them.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.compare import drawings, groups, page, spread, study_table, terminal
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.digits import format_integer, format_three_digits
from hvdtrain.compare.files import write_all
from hvdtrain.compare.groups import Group
from hvdtrain.compare.metrics import metrics_of
from hvdtrain.compare.tables import (
    ENERGY,
    Column,
    escape_line,
    mean_column,
    to_csv,
    to_markdown,
)
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput


def main(argv: Sequence[str] | None = None) -> None:
    """Compare what the command line names."""
    options = _parser().parse_args(argv)
    if (options.sweep is None) == (not options.runs):
        raise BadInput("nothing to compare. Pass run folders, or --sweep FILE, not both.")
    if options.sweep is not None:
        if options.out is not None:
            raise BadInput(
                "--out: only for run folders, since a study's files are written beside its sweep.json. Leave --out out."
            )
        text, complaints = study_table.compare(options.sweep)
    else:
        text, complaints = compare(options.runs, options.out or Path("comparison"))
    exits.print_answer(text.removesuffix("\n"))
    for line in complaints:
        exits.print_message("warning", escape_line(line))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message.removeprefix('argument ')}. See --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m hvdtrain.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="FOLDER", help="run folders, or folders above them")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write; default: ./comparison")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="the sweep.json of a scaling study")
    return parser


def compare(folders: Sequence[Path], out: Path) -> tuple[str, list[str]]:
    """Write the comparison into `out`; return the text for a terminal, and warnings."""
    complaints: list[str] = []
    runs = runfolder.read_runs(runfolder.find_folders(folders), complaints)
    if not runs:
        raise BadInput(f"no run can be compared: {'; '.join(complaints)}. Pass other folders.")
    run_groups = groups.group_runs(runs)
    columns = table(run_groups)
    verdicts = groups.verdicts(run_groups)
    notes = [line for line in (groups.separation_reason(run_groups), *groups.remarks(run_groups)) if line]
    text = to_markdown(columns)
    for verdict in verdicts:
        text += f"\n- {verdict.quantity} of {verdict.group} against {verdict.base}: {verdict.text}"
    text += "".join(f"\n\n{line}" for line in [*notes, *([spread.RULE] if verdicts else [])]).rstrip() + "\n"
    curves = drawings.draw_curves(run_groups)
    document = page.render_page(run_groups, columns, verdicts, [*notes, *complaints], drawings.to_svg(curves))
    write_all(
        out,
        {
            "table.md": text.encode(),
            "table.csv": to_csv(columns).encode(),
            "curves.png": drawings.to_png(curves),
            "report.html": document.encode(),
        },
    )
    shown = terminal.format_runs(columns, groups.chosen_settings(run_groups), verdicts, out / "report.html")
    return shown, [*groups.remarks(run_groups), *complaints]


def table(run_groups: Sequence[Group]) -> list[Column]:
    """Return columns of names, of the settings that differ, and of results; one row for each group."""
    first_runs = [group.runs[0] for group in run_groups]
    all_runs = [run for group in run_groups for run in group.runs]
    seeds = [", ".join("-" if run.seed is None else str(run.seed) for run in group.runs) for group in run_groups]
    counts = [len(group.runs) for group in run_groups]
    columns = [
        Column(title="run", texts=[group.name for group in run_groups]),
        Column(title="n", texts=list(map(str, counts)), values={"n": counts}, is_right_aligned=True),
        Column(title="seeds", texts=seeds),
    ]
    for name in groups.differing_settings(all_runs):
        texts = [run.settings.get(name, runfolder.MISSING) for run in first_runs]
        columns.append(Column(title=name, texts=texts, is_setting=True))
    units = dict.fromkeys(run.unit for run in first_runs if run.unit) or ["images"]

    def add(*numbers: tuple[str, str, Callable[[float], str]]) -> None:
        for title, name, number_format in numbers:
            columns.append(mean_column(title, name, [group.mean(name) for group in run_groups], number_format))

    add(("time s", "wall_time_s", format_three_digits))
    add(*((f"{unit}/s", f"train_{unit}_per_s", format_three_digits) for unit in units))
    bests = {run.best for run in all_runs}
    for metric in metrics_of(all_runs):
        means = [group.metric(metric) for group in run_groups]
        is_best = metric.name in bests
        columns.append(mean_column(metric.title, metric.column, means, metric.number_format, is_best=is_best))
    add(("steps", "steps", format_integer), ("skipped steps", "skipped_steps", format_integer))
    add(*([ENERGY] if any(group.mean(ENERGY[1]) for group in run_groups) else []))
    add(("peak MiB", "memory.resident_mib", format_three_digits))
    columns.append(Column(title="exit reason", texts=[run.exit_reason for run in first_runs]))
    return columns


if __name__ == "__main__":
    exits.run(main)
