"""README and docs, as files: what a link names is there, and the words are plain English, also in the code."""

import json
import re
from pathlib import Path

import pytest
import yaml

from bench import pairs
from bench.pairs import Table, middle
from scripts.docs import benchmarks, consoles, examples, figures, messages
from tests import tutorial

PROJECT = Path(__file__).parents[2]
PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "hostfiles").glob("*.md")]
CODE = [
    file for name in ("hvdtrain", "launch", "scripts", "examples", "bench") for file in (PROJECT / name).rglob("*.py")
]


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or (anchor and anchor not in anchors(target))


def test_links_lead_to_files_and_headings_that_are_there():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    inside = [(page, link) for page, link in links if "://" not in link]
    assert [f"{page}: {link}" for page, link in inside if leads_nowhere(page, link)] == []


@pytest.mark.parametrize(("page", "words"), [(PROJECT / "README.md", 1000), (tutorial.PAGE, 900)])
def test_what_everybody_reads_is_short(page, words):
    assert len(page.read_text().split()) <= words


def test_the_tour_of_contributing_names_six_files_with_their_lines():
    tour = re.findall(r"^\| \[(\S+)\]\(\1\) \| (\d+) \|", (PROJECT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(tour) == 6
    counted = {file: len((PROJECT / file).read_text().splitlines()) for file, _ in tour}
    assert {file: lines for file, lines in tour if abs(int(lines) - counted[file]) > 25} == {}


def test_the_workflow_runs_what_must_pass_before_a_change_lands():
    workflow = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text())
    [*_, last] = workflow["jobs"]["ci"]["steps"]
    assert last["run"].splitlines()[-1].split()[-1] == ".ci/run"


def test_the_diffs_of_the_tutorial_lead_to_the_example():
    example = (PROJECT / "examples/tabular.py").read_text()
    *before, last = tutorial.programs()
    assert last == re.sub(r'^""".*?"""\n\n', "", example, flags=re.DOTALL)
    assert len(before) == 3
    for program in before:
        compile(program, "mine.py", "exec")


# Word order and words that are not plain English, with what to write. The generated pages hold the docstrings of
# settings and of the public names, and all of --help.
ODD = {
    r"^(- )?Of (?!course)": "the subject first",
    r"(^|[.] )(What|Where) (?!is |are |does |do |to )": "the subject first; 'if' for a condition",
    r"\bso many\b": "N, or this number of",
    r"\banew\b": "again, from scratch",
    r"\b(go|goes|going) on\b": "continue, resume",
    r"\bclos(e|es|ed|ing) up\b": "recover",
    r"\b(tells|told)\b(?!.* apart| from)": "prints, reports",
    r"\bthose that are left\b": "the remaining",
    r"\bin place of\b": "instead of",
    r"\b(of )?one's own\b": "your own",
    r"\bnobody\b": "the subject's name",
    r"\bfor ever\b": "forever, or without a limit",
    r"\bas ever\b": "as before",
    r"\bgive that too\b": "requires X",
    r"\bthat (is|are) there\b": "that exists",
}
# In docstrings and comments, besides those.
ODD_IN_CODE = {
    **ODD,
    r"[.:;] Of (?!course)": "the subject first",
    r"\bbeside\b": "next to, besides, compared with",
    r"\bbut for\b": "except for",
    r"\bin turns\b": "in turn",
    r"\bfor (people|a person)\b": "for the user",
    r"\b(wants|asks|asked)\b": "needs, requests, probes",
}
EXCEPTIONS = ("messages.md", "CHANGELOG.md", "CONTRIBUTING.md")  # texts of the programs; notes for who knows the code


def test_pages_are_in_plain_english():
    odd = [
        f"{page.relative_to(PROJECT)}: {found[0]!r}: {remedy}"
        for page in PAGES
        if page.name not in EXCEPTIONS
        for words, remedy in ODD.items()
        for found in re.finditer(words, prose(page), re.MULTILINE)
    ]
    assert not odd, "\n".join(odd)


# A text between two """, or lines of a comment; ast and tokenize would take ten times as long for all files.
REMARK = re.compile(r'"""((?:.|\n)*?)"""|(?:^ *|  )# (.*(?:\n *# .*)*)', re.MULTILINE)


def test_docstrings_and_comments_are_in_plain_english():
    words = re.compile("|".join(ODD_IN_CODE))
    odd = []
    for file in CODE:
        source = file.read_text()
        for remark in REMARK.finditer(source):
            text = " ".join(re.sub(r"\n *# ", " ", remark[1] or remark[2] or "").split())
            if words.search(text):
                line = source.count("\n", 0, remark.start()) + 1
                for pattern, remedy in ODD_IN_CODE.items():
                    found = [phrase[0] for phrase in re.finditer(pattern, text)]
                    odd += [f"{file.relative_to(PROJECT)}:{line}: {phrase!r}: {remedy}" for phrase in found]
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize(
    ("page", "printed", "is_same"),
    [
        ("one\n...\ntook ... s (a+b)\n", "one\ntwo\nthree\ntook 1.5 s (a+b)\n", True),
        ("one\n", "one\ntwo\n", False),
        ("a.b\n", "a-b\n", False),
    ],
)
def test_dots_in_a_console_block_stand_for_anything_and_nothing_else_does(page, printed, is_same):
    assert consoles.matches(page, printed) is is_same


def test_a_block_that_is_marked_gives_its_commands_with_what_they_print(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- checked -->\n```console\n$ a \\\n    b\nx\n\ny\n$ c\n```\n\n```console\n$ d\n```\n")
    found = [(session.command, session.output) for session in consoles.sessions(page)]
    assert found == [("a \\\n    b", "x\n\ny\n"), ("c", "")]


def right():
    """A sum that later examples use.

    >>> print("a line"); two = one + 1
    a ...
    """


def wrong():
    """>>> two + 1
    4
    """


def without():
    """A sentence."""


def test_an_example_of_a_docstring_that_prints_something_else_is_an_error():
    found = list(examples.failures({"right": right, "wrong": wrong, "without": without}, {"one": 1}))
    assert [text.splitlines()[0] for text in found] == [
        "docs: wrong: an example of its docstring prints something else",
        "docs: without: its docstring has no example",
    ]
    assert found[0].endswith("Got:\n    3\n")


@pytest.mark.parametrize(("torch", "is_named"), [("2.11.0+cu130", False), ("2.14.1+cu130", True)])
def test_a_result_of_the_harness_is_a_table_of_the_page_on_benchmarks(tmp_path, monkeypatch, torch, is_named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pairs, "versions", lambda: {"torch": torch})
    result = Table(name="speed", question="Which is faster:", columns=["side", "ratio", "bytes"])
    result.add("ours", middle([1.23456, 2.34567, 3.45678]), 123456)
    result.write()
    text = benchmarks.table((tmp_path / "build/bench/speed.json").read_text())
    assert "| side | ratio | bytes |\n|---|---|--:|\n| ours | 2.35 (1.23 to 3.46) | 123,456 |" in text
    assert "n = 3" in text
    assert ("torch 2.14.1" in text) == is_named


def test_a_number_keeps_the_digits_that_a_result_gives_it():
    row = '{"side": "ours", "s": 4.0, "ratio": {"median": 1.00, "low": 0.90, "high": 1.1, "n": 5}}'
    text = benchmarks.table(f'{{"question": "Speed", "n": 3, "rows": [{row}]}}')
    assert text.endswith("| ours | 4.0 | 1.00 (0.90 to 1.1, n = 5) |")


RESULT = {
    "question": "How fast, on 2 hosts",
    "rows": [
        {"way": "flat", "ranks": 2, "s": {"median": 4.38, "low": 2.67, "high": 5.27, "n": 7}, "goodput": "86 %"},
        {"way": "`--sync local`", "ranks": 4, "s": 1.5, "goodput": None},
        {"way": "flat", "ranks": 24, "s": 9, "goodput": None},
    ],
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    (tmp_path / "speed.json").write_text(json.dumps(RESULT))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "It took 4.4 s<!-- from speed.json / flat + 2 / s -->, or 1.5 s<!-- from speed.json / local / s -->.",
        "<!-- from speed.json -->\nIt took 4.38 s (2.67 to 5.27),\nand kept 86 %.",
        "<!-- from speed.json / flat + 2 -->\n| a | 4.38 s |\n|---|---|\n| b | 86 % |",
        "A limit of 2 minutes<!-- from hvdtrain/loop/code.py --> and 8 %<!-- from hvdtrain/loop/code.py -->.",
        "It has 9.9 s<!-- from Goyal et al. 2017 -->.",
        "Python 3.11, port 6006, `--limit 5 s`, [x](#3-s), 57 lines, CUDA 13.0, at 100 Mbit/s",
        "Run\n\n    took 5 s\n\n```\n5 s\n```",
        "<!-- t: bench/x.py -->\n5 s\n<!-- end of t -->",
    ],
)
def test_a_figure_with_the_number_of_its_source_is_right(text, results, tmp_path, monkeypatch):
    (tmp_path / "hvdtrain" / "loop").mkdir(parents=True)
    (tmp_path / "hvdtrain" / "loop" / "code.py").write_text("LIMIT_S = 120.0\nSHARE = 0.08\n")
    monkeypatch.setattr(figures, "PROJECT", tmp_path)
    assert list(figures.of_page(text)) == []


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("one\n\nIt took\n4.4 s.", 3, "4.4 s: without a source"),
        ("one\n\n- It took 4.4 s<!-- from speed.json / flat + 2 / s -->, not 1.5 s.", 3, "1.5 s: without a source"),
        ("| 1.5 s<!-- from speed.json --> |\n| 4.4 s |", 2, "4.4 s: without a source"),
        ("98.66 ± 0.44", 1, "98.66 ± 0.44: without a source"),
        ("It took 4.3 s<!-- from speed.json / flat + 2 / s -->.", 1, "4.3 s: not in speed.json / flat + 2 / s"),
        ("It took 2.7 to 5.4 s<!-- from speed.json / flat + 2 / s -->.", 1, "2.7 to 5.4 s: not in"),
        ("It took 7 s<!-- from speed.json / flat + 2 / s -->.", 1, "7 s: not in"),  # n is not the median
        ("It took 9 s<!-- from speed.json / flat / s -->.", 1, "flat matches 2 rows or columns, not 1"),
        ("It took 9 s<!-- from slow.json -->.", 1, "no file slow.json"),
        (
            "A limit of 61 s<!-- from hvdtrain/settings/safety/watchdog.py -->.",
            1,
            "61 s: not in hvdtrain/settings/safety/watchdog.py",
        ),
    ],
)
def test_a_figure_without_a_source_or_with_another_number_is_an_error(text, line, problem, results):
    [(found_line, found)] = figures.of_page(text)
    assert (found_line, problem in found) == (line, True), found


def written(tmp_path, source):
    file = tmp_path / "a.py"
    file.write_text(source)
    return [(found.severity, found.text, found.status) for found in messages.find_messages(file)]


def test_severity_and_status_are_those_of_what_prints(tmp_path):
    source = """
print_message("warning", f"no replacement for {rank}")
remarks.append(f"note: {host}: running on CPU")
raise EndOfRun("replicas differ", status=REPLICAS_DIFFER)
raise EndOfRun(f"saved at step {step}", status=0)
raise ValueError("ours alone")
"""
    assert written(tmp_path, source) == [
        ("warning", "no replacement for RANK", ""),
        ("note", "HOST: running on CPU", ""),
        ("error", "replicas differ", "4"),
        ("note", "saved at step STEP", "0"),
    ]
