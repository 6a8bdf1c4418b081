"""What a terminal has room for: the columns that tell most of a comparison, and one sentence below them."""

from collections.abc import Collection, Sequence
from pathlib import Path

from hvdtrain.compare.groups import Verdict
from hvdtrain.compare.runs import FINISHED, MISSING
from hvdtrain.compare.tables import Column, in_one_line, markdown, shortened

MAX_COLUMNS = 10
MAX_SETTINGS = 4  # more of them if few results are left to show
MAX_NAMED = 3  # groups in the sentence
JUDGED = {
    "inside": "inside the spread over seeds",
    "outside": "outside the spread over seeds",
    "unknown": "too few runs to tell",
}
USUAL = {"exit reason": FINISHED, "skipped steps": "0", "n": "1"}  # a column with nothing else is left out
LEFT_OUT = ("seeds", "steps", "peak MiB")
FIRST = ("exit reason", "skipped steps", "accuracy %", "n", "F1", "perplexity", "loss", "time s")  # before the speeds


def of_runs(columns: Sequence[Column], chosen: Collection[str], verdicts: Sequence[Verdict], page: Path) -> str:
    """A table of the runs, with the settings named in `chosen` before all results, and where the rest of it is."""
    name, *others = columns
    settings = [column for column in others if column.title in chosen]
    results = [column for column in others if not column.setting and _is_telling(column)]
    most = sorted(results, key=_place)[: MAX_COLUMNS - 1 - min(len(settings), MAX_SETTINGS)]
    settings = settings[: MAX_COLUMNS - 1 - len(most)]
    shown = [Column(title=column.title, texts=shortened(column.texts)) for column in settings]
    table = markdown([name, *shown, *(column for column in results if column in most)])
    sentence = f"{_differences(verdicts)}all columns, curves and 95 % intervals: {page}"
    return f"{table}\n{sentence[0].upper()}{sentence[1:]}\n"


def of_study(columns: Sequence[Column]) -> str:
    """The table of a study, without what its other columns tell as well if it is too wide."""
    spare = len(columns) - MAX_COLUMNS
    hours = [column.title for column in columns if column.title.endswith("-hours")]
    least = ("steps", "hosts", "n", *hours)[: max(0, spare)]
    return markdown([column for column in columns if column.title not in least])


def _is_telling(column: Column) -> bool:
    usual = {MISSING, USUAL.get(column.title, MISSING)}
    return column.title not in LEFT_OUT and not set(column.texts) <= usual


def _place(column: Column) -> int:
    return FIRST.index(column.title) if column.title in FIRST else len(FIRST)


def _differences(verdicts: Sequence[Verdict]) -> str:
    """The differences in accuracy, or in time without one, to the first group; those beyond the spread come first."""
    told = [verdict for verdict in verdicts if verdict.what == "accuracy"] or verdicts
    if not told:
        return ""
    told = sorted(told, key=lambda verdict: verdict.kind != "outside")
    found = [f"{in_one_line(one.here)} {one.change} ({JUDGED[one.kind]})" for one in told[:MAX_NAMED]]
    if len(told) > MAX_NAMED:
        found.append(f"{len(told) - MAX_NAMED} more")
    return f"{told[0].what} against {in_one_line(told[0].base)}: {', '.join(found)}; "
