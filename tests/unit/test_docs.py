"""README and docs, as files: what a link names is there."""

import re
from pathlib import Path

import pytest

from tests import tutorial

PROJECT = Path(__file__).parents[2]
PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md"), *(PROJECT / "hostfiles").glob("*.md")]


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    for path, _, anchor in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_readme_is_one_page():
    assert len((PROJECT / "README.md").read_text().split()) <= 1000


def test_the_tutorial_is_short():
    assert len(tutorial.PAGE.read_text().split()) <= 900


def test_the_diffs_of_the_tutorial_lead_to_the_example():
    example = (PROJECT / "examples/tabular.py").read_text()
    *before, last = tutorial.programs()
    assert last == re.sub(r'^""".*?"""\n\n', "", example, flags=re.DOTALL)
    assert len(before) == 3
    for program in before:
        compile(program, "mine.py", "exec")
