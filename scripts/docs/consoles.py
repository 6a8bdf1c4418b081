"""Checked console blocks of the docs: those below a line `<!-- checked -->`.

A block holds commands, each after `$ ` and continued after a backslash, and their output. In the output, `...` on a
separate line matches any lines, and inside a line any words. Commands run in the project's folder, and leave nothing in
it.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^<!-- checked -->\n+```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class Session:
    """A command of a page and its expected output."""

    page: Path
    command: str
    output: str


def sessions(page: Path) -> Iterator[Session]:
    """Yield the commands of a page that are run."""
    for block in BLOCK.findall(page.read_text()):
        for command, output in COMMAND.findall(block):
            yield Session(page=page, command=command, output=output)


def differences(pages: Iterable[Path]) -> Iterator[str]:
    """Yield a text with both outputs for each command that prints something else."""
    with ThreadPoolExecutor(2) as pool:
        yield from filter(None, pool.map(difference, [session for page in pages for session in sessions(page)]))


def difference(session: Session) -> str:
    """Return an empty text if the command prints what the page shows."""
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    done = subprocess.run(
        ["bash", "-c", f"{path}; {session.command}"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if matches(session.output, done.stdout):
        return ""
    name = session.page.relative_to(PROJECT)
    return f"docs: {name}: {session.command}\n--- the page\n{session.output}--- printed\n{done.stdout}"


def matches(expected: str, printed: str) -> bool:
    """Return whether the output is that of a page, except for `...`."""
    lines = [re.escape(line.rstrip()).replace(re.escape("..."), ".*") for line in expected.rstrip().splitlines()]
    pattern = "".join(r"(?:.*\n)*" if line == ".*" else rf"{line}\s*\n" for line in lines)
    return re.fullmatch(pattern, printed.rstrip() + "\n") is not None
