"""Compare run folders: their settings, their results, and whether results differ by more than the spread over seeds.

    python -m hvdtrain.compare runs/effnet                       all runs below, into ./comparison
    python -m hvdtrain.compare runs/effnet/a runs/effnet/b --out /tmp/ab
    python -m hvdtrain.compare --sweep sweeps/NAME/sweep.json    the table and picture of a scaling study

Runs that differ only in the seed are one row, mean +- standard deviation. The other rows are compared with the first
finished one, by the rule in hvdtrain.insight.compare.spread. Writes table.md and table.csv with all columns; prints the
results and the first settings that differ. Curves: TensorBoard.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hvdtrain.insight.compare import groups, study_table
from hvdtrain.insight.compare.groups import SeedGroup
from hvdtrain.insight.compare.metrics import metrics_of
from hvdtrain.insight.compare.runs import FINISHED, find_folders, read_runs
from hvdtrain.insight.compare.tables import (
    TableColumn,
    mean_column,
    metric_column,
    number_column,
    to_csv,
    to_markdown,
    write_all,
)
from hvdtrain.insight.compare.texts import MISSING, escape_line, format_digits, format_integer, shorten
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import BadInput

# A terminal gets no column that has only this value; nor these columns.
DEFAULTS = {"exit reason": FINISHED, "skipped steps": "0", "n": "1"}
DETAILS = ("seeds", "steps", "peak MiB")


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
    runs = read_runs(find_folders(folders), complaints)
    if not runs:
        raise BadInput(f"no run can be compared: {'; '.join(complaints)}. Pass other folders.")
    run_groups = groups.group_runs(runs)
    columns, names = table(run_groups), groups.chosen_settings(run_groups)
    verdicts = "\n".join(groups.verdicts(run_groups))
    text = f"\n{verdicts}\n" if verdicts else ""
    write_all(out, {"table.md": (to_markdown(columns) + text).encode(), "table.csv": to_csv(columns).encode()})
    shown = [replace(column, texts=list(map(shorten, column.texts))) for column in columns if _is_shown(column, names)]
    return f"{to_markdown(shown)}{text}\nAll columns: {out}\n", [*groups.remarks(run_groups), *complaints]


def _is_shown(column: TableColumn, chosen_settings: Sequence[str]) -> bool:
    """Whether a terminal gets this column."""
    if column.is_setting:
        return column.title in chosen_settings
    return column.title not in DETAILS and not set(column.texts) <= {MISSING, DEFAULTS.get(column.title, MISSING)}


def table(run_groups: Sequence[SeedGroup]) -> list[TableColumn]:
    """Return columns of names, of the settings that differ, and of results; one row for each group."""
    first_runs = [group.runs[0] for group in run_groups]
    all_runs = [run for group in run_groups for run in group.runs]
    seeds = [", ".join(MISSING if run.seed is None else str(run.seed) for run in group.runs) for group in run_groups]
    units = dict.fromkeys(run.unit for run in first_runs if run.unit) or ["images"]

    def means_of(title: str, name: str, number_format: Callable[[float], str]) -> TableColumn:
        return mean_column(title, name, [group.mean(name) for group in run_groups], number_format)

    return [
        TableColumn(title="run", texts=[group.name for group in run_groups]),
        number_column("n", "n", [len(group.runs) for group in run_groups]),
        TableColumn(title="seeds", texts=seeds),
        *(
            TableColumn(title=name, texts=[run.settings.get(name, MISSING) for run in first_runs], is_setting=True)
            for name in groups.differing_settings(all_runs)
        ),
        means_of("time s", "wall_time_s", format_digits),
        *(means_of(f"{unit}/s", f"train_{unit}_per_s", format_digits) for unit in units),
        *(metric_column(metric, [group.metric(metric) for group in run_groups]) for metric in metrics_of(all_runs)),
        means_of("steps", "steps", format_integer),
        means_of("skipped steps", "skipped_steps", format_integer),
        means_of("energy Wh", "energy_wh", format_digits),
        means_of("peak MiB", "memory.resident_mib", format_digits),
        TableColumn(title="exit reason", texts=[run.exit_reason for run in first_runs]),
    ]
