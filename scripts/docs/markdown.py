"""Tables and formatted text of generated pages, in Markdown."""

import re
from collections.abc import Collection, Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Collection[str] = ()) -> list[str]:
    """Return the lines of a table; numeric columns are aligned to the right."""
    rule = "".join("--:|" if name in numeric else "---|" for name in columns)
    lines = [f"| {' | '.join(columns)} |", f"|{rule}"]
    return [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows), ""]


def code(text: object) -> str:
    """Format the text as code; return empty text unchanged."""
    return f"`{text}`" if str(text) else ""


def options_as_code(text: str) -> str:
    """Format the options in a text as code: two dashes would become one."""
    return re.sub(r"(?<![`\w-])--?[a-z][\w-]*(?:[= ][A-Z]{2,}\b)?", lambda option: f"`{option[0]}`", text)
