"""Tables and words of generated pages, in Markdown."""

import re
from collections.abc import Collection, Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Collection[str] = ()) -> list[str]:
    """The lines of a table; numeric columns are aligned to the right."""
    rule = "".join("--:|" if name in numeric else "---|" for name in columns)
    lines = [f"| {' | '.join(columns)} |", f"|{rule}"]
    return [*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows), ""]


def code(text: object) -> str:
    """The text as code; nothing of an empty one."""
    return f"`{text}`" if str(text) else ""


def options_as_code(text: str) -> str:
    """The text with its options as code: two dashes would become one."""
    return re.sub(r"(?<![`\w-])--?[a-z][\w-]*(?:[= ][A-Z]{2,}\b)?", lambda option: f"`{option[0]}`", text)
