"""The programs of docs/tutorials/own-model.md: the first one, and what each of its diffs makes of the last."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/tutorials/own-model.md"


def programs():
    """Their texts in order."""
    text = PAGE.read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    diffs = re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    texts = [program]
    for diff in diffs:
        for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
            program = patched(program, hunk.splitlines(keepends=True))
        texts.append(program)
    return texts


def patched(program, hunk):
    """The program after the lines of one hunk, which fit in one place."""
    assert {line[0] for line in hunk} <= {" ", "+", "-", "\n"}, hunk
    before, after = ("".join(line[1:] or "\n" for line in hunk if line[0] != drop) for drop in ("+", "-"))
    assert program.count(before) == 1, before
    return program.replace(before, after)
