"""The output for a terminal: the most important columns of a comparison, and one sentence below them."""

from collections.abc import Collection, Sequence
from pathlib import Path

from hvdtrain.compare.groups import TIME, Verdict
from hvdtrain.compare.runs import FINISHED, MISSING
from hvdtrain.compare.tables import Column, escape_line, shorten, to_markdown

MAX_COLUMNS = 10
MAX_SETTINGS = 4  # more if there are few results
MAX_NAMED = 3  # groups in the sentence
JUDGEMENTS = {
    "inside": "inside the spread over seeds",
    "outside": "outside the spread over seeds",
    "unknown": "too few runs to tell",
}
DEFAULTS = {"exit reason": FINISHED, "skipped steps": "0", "n": "1"}  # a column with only this value is left out
HIDDEN_TITLES = ("seeds", "steps", "peak MiB")
BEST = "best metric"
PRIORITY = ("exit reason", "skipped steps", BEST, "n", "accuracy %", "F1", "perplexity", "loss", "time s")


def format_runs(columns: Sequence[Column], chosen: Collection[str], verdicts: Sequence[Verdict], page: Path) -> str:
    """Format a table of the runs, with the `chosen` settings before all results, and the location of the rest."""
    name, *other_columns = columns
    settings = [column for column in other_columns if column.title in chosen]
    results = [column for column in other_columns if not column.is_setting and _is_telling(column)]
    kept = sorted(results, key=_priority)[: MAX_COLUMNS - 1 - min(len(settings), MAX_SETTINGS)]
    settings = settings[: MAX_COLUMNS - 1 - len(kept)]
    shown = [Column(title=column.title, texts=shorten(column.texts)) for column in settings]
    table = to_markdown([name, *shown, *(column for column in results if column in kept)])
    sentence = f"{_differences(verdicts)}all columns, curves and 95 % intervals: {page}"
    return f"{table}\n{sentence[0].upper()}{sentence[1:]}\n"


def format_study(columns: Sequence[Column]) -> str:
    """Format the table of a study; if it is too wide, without redundant columns."""
    surplus = len(columns) - MAX_COLUMNS
    hours = [column.title for column in columns if column.title.endswith("-hours")]
    hidden = ("steps", "hosts", "n", *hours)[: max(0, surplus)]
    return to_markdown([column for column in columns if column.title not in hidden])


def _is_telling(column: Column) -> bool:
    defaults = {MISSING, DEFAULTS.get(column.title, MISSING)}
    return column.title not in HIDDEN_TITLES and not set(column.texts) <= defaults


def _priority(column: Column) -> int:
    title = BEST if column.is_best else column.title
    return PRIORITY.index(title) if title in PRIORITY else len(PRIORITY)


def _differences(verdicts: Sequence[Verdict]) -> str:
    """Describe the differences in the best metric, else in time, to the first group; the clear ones come first."""
    chosen = [verdict for verdict in verdicts if verdict.quantity != TIME] or verdicts
    if not chosen:
        return ""
    chosen = sorted(chosen, key=lambda verdict: verdict.kind != "outside")
    texts = [
        f"{escape_line(verdict.group)} {verdict.change} ({JUDGEMENTS[verdict.kind]})" for verdict in chosen[:MAX_NAMED]
    ]
    if len(chosen) > MAX_NAMED:
        texts.append(f"{len(chosen) - MAX_NAMED} more")
    return f"{chosen[0].quantity} against {escape_line(chosen[0].base)}: {', '.join(texts)}; "
