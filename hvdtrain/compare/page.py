"""A comparison as one page that needs neither a network nor scripts."""

import base64
from collections.abc import Sequence
from html import escape

from hvdtrain.compare import spread
from hvdtrain.compare.drawings import group_colour
from hvdtrain.compare.groups import Group, Verdict, differing_settings
from hvdtrain.compare.metrics import best_metric
from hvdtrain.compare.runs import MISSING
from hvdtrain.compare.tables import Column

STYLE = """
:root { color-scheme: light; --ink: #1f2328; --faint: #656d76; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  "Liberation Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 12px; }
.sub { color: var(--faint); margin: 4px 0 24px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px;
  margin-bottom: 20px; }
.wide { overflow-x: auto; margin: 0 -22px; padding-right: 22px; }
.wide th:first-child, .wide td:first-child { padding-left: 22px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 8px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; font-size: 12.5px; line-height: 1.25; vertical-align: bottom;
  white-space: normal; }
tbody tr:last-child td { border-bottom: 0; }
.right { text-align: right; }
th.setting { background: #eaf2fb; color: #1d4f8b; }
td.setting { background: #f5f9fd; }
td.none { color: #a8b0b8; }
.name { font-weight: 600; }
.wide .first { position: sticky; left: 0; background: var(--paper); }
.wide + .wide { margin-top: 22px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.pm { color: var(--faint); }
.badge { display: inline-block; min-width: 136px; text-align: center; font-size: 12.5px; font-weight: 600;
  border-radius: 999px; padding: 2px 12px; }
.inside { background: #eef0f2; color: #57606a; }
.outside { background: #ddf4e4; color: #12612e; }
.unknown { background: #fff3d6; color: #7d4e00; }
.verdicts td { white-space: normal; }
.verdicts td.tight { white-space: nowrap; }
.rule { color: var(--faint); font-size: 13px; margin: 12px 0 0; }
img { width: 100%; height: auto; display: block; }
ul.notes { margin: 0; padding-left: 20px; }
ul.notes li { margin: 4px 0; overflow-wrap: anywhere; }
details { margin-top: 8px; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 2px 28px; margin: 12px 0 0;
  font-size: 13px; }
dl div { display: flex; justify-content: space-between; gap: 12px; border-bottom: 1px dotted var(--line); }
dt { color: var(--faint); overflow-wrap: anywhere; }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; flex-shrink: 0; max-width: 70%; }
.paths { font: 12.5px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; margin: 12px 0 0; overflow-wrap: anywhere; }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
MOST_SETTINGS = 5  # next to the results
BADGES = {"inside": "inside the spread", "outside": "outside the spread", "unknown": "not known"}


def render_page(
    groups: Sequence[Group], columns: Sequence[Column], verdicts: Sequence[Verdict], notes: Sequence[str], curves: bytes
) -> str:
    """The page; `curves` is an SVG."""
    runs = [run for group in groups for run in group.runs]
    picture = base64.b64encode(curves).decode()
    curves_alt = f"train loss and {best_metric(runs).axis} over steps, epochs and seconds"
    image = f'<img alt="{escape(curves_alt)}" src="data:image/svg+xml;base64,{picture}">'
    parts = [
        f"<section><h2>What differs, and what came out</h2>{_tables(columns)}</section>",
        _verdicts(verdicts),
        f"<section><h2>Learning curves</h2>{image}</section>",
        _notes(notes),
        _shared_settings(groups),
    ]
    counts = f"{_count(len(runs), 'run')} in {_count(len(groups), 'group')}"
    title = "Comparison of runs"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><main><h1>{title}</h1>"
        f'<p class="sub">{counts}; runs that differ in the seed alone are one row, mean ± standard deviation</p>\n'
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tables(columns: Sequence[Column]) -> str:
    """Return one table, or two if the settings fill the width of the page."""
    settings = [column for column in columns if column.is_setting]
    if len(settings) <= MOST_SETTINGS:
        return _table(columns)
    return _table([columns[0], *settings]) + _table([column for column in columns if not column.is_setting])


def _table(columns: Sequence[Column]) -> str:
    head = "".join(f'<th class="{_classes(column)}">{_breakable(column.title)}</th>' for column in columns)
    rows = zip(*(column.texts for column in columns), strict=True)
    body = "".join(
        f"<tr>{''.join(_cell(column, text, index) for column, text in zip(columns, row, strict=True))}</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _breakable(title: str) -> str:
    return escape(title).replace("_", "_<wbr>")


def _classes(column: Column) -> str:
    classes = (
        ("first name", column.title == "run"),
        ("right", column.is_right_aligned),
        ("setting", column.is_setting),
    )
    return " ".join(name for name, is_set in classes if is_set)


def _cell(column: Column, text: str, index: int) -> str:
    mean, spread_sign, deviation = escape(text).partition(" ± ")
    shown = f'{mean}<span class="pm"> ± {deviation}</span>' if spread_sign and column.is_right_aligned else escape(text)
    if column.title == "run":
        shown = f'<span class="dot" style="background:{group_colour(index)}"></span>{shown}'
    return f'<td class="{_classes(column)}{" none" if text == MISSING else ""}">{shown}</td>'


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    rows = "".join(
        f'<tr><td class="tight"><span class="badge {verdict.kind}">{BADGES[verdict.kind]}</span></td>'
        f'<td class="tight">{verdict.quantity}</td><td class="tight name">{escape(verdict.group)}</td>'
        f"<td>{escape(verdict.text)}</td></tr>"
        for verdict in verdicts
    )
    base = escape(verdicts[0].base)
    return (
        f"<section><h2>Is it more than the spread over seeds? Each against {base}</h2>"
        f'<div class="wide"><table class="verdicts"><tbody>{rows}</tbody></table></div>'
        f'<p class="rule">{escape(spread.RULE)}</p></section>'
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in notes)
    return f'<section><h2>To know</h2><ul class="notes">{items}</ul></section>'


def _shared_settings(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    different = set(differing_settings(runs))
    settings = next((run.settings for run in runs if run.settings), {})
    shared = {name: value for name, value in settings.items() if name not in different}
    pairs = "".join(f"<div><dt>{_breakable(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shared.items())
    paths = "<br>".join(escape(f"{run.folder.resolve()}") for run in runs)
    return (
        f"<section><details><summary>What all runs share: {_count(len(shared), 'setting')}</summary>"
        f"<dl>{pairs}</dl></details>"
        f'<details><summary>Where they lie</summary><p class="paths">{paths}</p></details></section>'
    )
