"""Write what is generated in README and docs/, or check that they are up to date.

python -m scripts.docs          writes the pages and the pictures
python -m scripts.docs check    fails if one differs, if a figure in README or docs/ has no source or is not in it, if a
                                 command in docs/ or an example of a docstring prints something else, or if a row of
                                 docs/reference/step-costs.md is counted differently
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from scripts.docs import api, benchmarks, commands, consoles, examples, figures, messages, options, step_costs
from scripts.docs.pictures import album

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = {
    DOCS / "explanation/benchmarks.md": benchmarks.render,
    DOCS / "reference/hvdlaunch.md": commands.render,
    DOCS / "reference/options.md": options.render,
    DOCS / "reference/api.md": api.render,
    DOCS / "reference/messages.md": messages.render,
}
FILLED = {page: partial(benchmarks.filled, page) for page in benchmarks.ELSEWHERE}
PICTURES = {DOCS / f"pictures/{name}.svg": draw for name, draw in album.PICTURES.items()}


def out_of_date() -> Iterable[tuple[Path, str]]:
    """Yield the generated files that differ from what the code would write, with the new content."""
    for file, make in (PAGES | FILLED | PICTURES).items():
        text = make()
        if not file.exists() or file.read_text() != text:
            yield file, text


def write() -> int:
    """Write what has changed; return the exit status."""
    for file, text in out_of_date():
        file.write_text(text)
        print(file.relative_to(PROJECT))
    return 0


def check() -> int:
    """Print what is out of date, and commands and examples with different output; return the exit status."""
    problems = [f"docs: {file.relative_to(PROJECT)}: out of date. Run make docs." for file, _ in out_of_date()]
    problems += step_costs.differences()
    pages = sorted(DOCS.rglob("*.md"))
    by_hand = [page for page in pages if page not in PAGES]
    problems += figures.problems([PROJECT / "README.md", *by_hand])
    problems += consoles.differences(pages)
    problems += examples.problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["check"]):
        sys.exit("docs: write python -m scripts.docs, or python -m scripts.docs check")
    sys.exit(check() if sys.argv[1:] else write())
