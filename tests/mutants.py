"""Single-line breaks of hvdtrain, launch and the set-up scripts: do the tests find them? No part of CI, and no test.

    python tests/mutants.py --check                              every text that is replaced occurs exactly once
    nice python tests/mutants.py --out found.jsonl               a room's unit tests, to the first that finds it
    nice python tests/mutants.py --out found.jsonl --all         to the end: every test that finds it
    nice python tests/mutants.py --out found.jsonl ROOM ...      the breaks of these rooms alone
    nice python tests/mutants.py --out found.jsonl --by "tests/mpi -m slow"    what is not found yet, by other tests

The breaks are in mutants.txt. They are made one after the other in a copy of HEAD, so nothing here is touched; what is
not committed is not tested. pytest runs in a fork of this process, which has imported torch already. A command that was
cut off goes on where it was: what is known stands in the file, line by line, and a line that is deleted is tried again.
The tests must pass unbroken first.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401 (each fork has it)

LIMIT_S = 900  # tests that take longer have found the break
UNIT_TESTS = {  # where they are not in tests/unit/ROOM
    "program": "tests/unit/program tests/unit/test_effnet.py",
    "process.py": "tests/unit/hosts tests/unit/run/supervise",
    "run/supervise/traces": "tests/unit/run/supervise",
    "cores.py": "tests/unit/machine/test_topology.py",
    "machine/show": "tests/unit/machine",
    "run/start/launchers": "tests/unit/run/start",
    "settings/safety": "tests/unit/settings/safety tests/unit/test_files.py",
    "loop/witnesses": "tests/unit/core",
    "setup.sh": "tests/setup/test_setup.py",
    "build_horovod.sh": "tests/setup/test_setup.py",
}


class Mutant(NamedTuple):
    """One break: a text within one line, and what a careless programmer might have written."""

    file: str
    original: str
    replacement: str

    @property
    def room(self) -> str:
        """Its folder below the package, or the name of a file that is in none."""
        _, *folders, name = Path(self.file).parts
        return "/".join(folders) or name

    @property
    def unit_tests(self) -> str:
        """What pytest is to run of its room."""
        return UNIT_TESTS.get(self.room, f"tests/unit/{self.room}")

    @property
    def own_tests(self) -> str:
        """The file of tests that is called like its file, which may not be there."""
        return f"tests/unit/{self.room}/test_{Path(self.file).stem}.py"


def read_mutants() -> list[Mutant]:
    """The breaks, three lines each."""
    lines = (Path(__file__).with_suffix(".txt")).read_text().partition("\n\n")[2].splitlines()
    return [Mutant(file, old[2:], new[2:]) for file, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True)]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--by", help="words of pytest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # pytest is ended, too
    mutants = read_mutants()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        project = Path(folder)
        subprocess.run(["git", "clone", "--quiet", "--shared", Path(__file__).parents[1], project], check=True)
        if wrong := [one for one in mutants if (project / one.file).read_text().count(one.original) != 1]:
            sys.exit("not exactly once in its file:\n" + "\n".join(map(str, wrong)))
        if options.check or options.out is None:
            return
        findings = Findings(options.out, project)
        for mutant in mutants:
            if mutant.room in (options.rooms or [mutant.room]) and not (options.by and findings.of(mutant)):
                findings.add(mutant, options.by or mutant.unit_tests, first=not options.all)
        print(table(mutants, findings))


class Findings:
    """What is known of each break, in a file of JSON lines: the tests that have failed, by what pytest ran."""

    def __init__(self, file: Path, project: Path) -> None:
        self._file, self._project = file, project
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {(Mutant(*line["mutant"]), line["tests"]): line["failed"] for line in map(json.loads, lines)}

    def of(self, mutant: Mutant) -> list[str]:
        """All tests that have found it."""
        return [test for (known, _), failed in self.known.items() if known == mutant for test in failed]

    def add(self, mutant: Mutant, tests: str, *, first: bool) -> None:
        """Run these tests on the broken project, and before that once on an unbroken one, if they have not run yet."""
        unbroken = Mutant("", "", "")
        for one in (unbroken, mutant):
            if (one, tests) in self.known:
                continue
            start_s = time.monotonic()
            runs = [shlex.split(tests) + ["-x"] * first]
            has_own = tests == mutant.unit_tests and (self._project / mutant.own_tests).exists()
            if first and one is mutant and has_own:
                runs.insert(0, [mutant.own_tests, "-x"])  # it is soon known
            with broken(self._project, one):
                found = (failed_tests(self._project, words, writes_bytecode=one is unbroken) for words in runs)
                failed = next(filter(None, found), [])
            if one is unbroken and failed:
                sys.exit(f"unbroken, {failed[0]} fails: see to that first")
            self.known[one, tests] = failed
            with self._file.open("a") as out:
                out.write(json.dumps({"mutant": list(one), "tests": tests, "failed": failed}) + "\n")
            count = f"{len(failed)} failed, {failed[0]}" if failed else "passed"
            print(f"{time.monotonic() - start_s:.0f} s {one.file or tests}: {one.replacement}: {count}", flush=True)


@contextlib.contextmanager
def broken(project: Path, mutant: Mutant):
    """The project with this break in it."""
    if not mutant.file:
        yield
        return
    path = project / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.original, mutant.replacement))
    try:
        yield
    finally:
        path.write_text(text)


def failed_tests(project: Path, words: list[str], *, writes_bytecode: bool) -> list[str]:
    """The tests that fail there."""
    with tempfile.NamedTemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            sys.dont_write_bytecode = not writes_bytecode  # that of a break might be taken for that of the next one
            _run_pytest(project, words, Path(output.name))
        deadline = time.monotonic() + LIMIT_S
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            _end(child)
        failed = list(dict.fromkeys(output.read().splitlines()))
    if not ended[0]:
        return [*failed, f"no end within {LIMIT_S} s"]
    return failed if failed or not ended[1] else [f"pytest ended with status {ended[1]}"]


class Recorder:
    """Writes down the tests that fail, and files that cannot be collected."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """See pytest."""
        if report.failed:
            with self._output.open("a") as out:
                out.write(f"{report.nodeid}\n")


def _run_pytest(project: Path, words: list[str], output: Path) -> None:
    """Be pytest in this project."""
    os.setsid()
    os.chdir(project)
    os.environ.update(PYTHONPATH=str(project), COLUMNS="200")
    os.environ.update({"PYTHONDONTWRITEBYTECODE": "1"} if sys.dont_write_bytecode else {})
    sys.path[0] = str(project)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        status = pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=[Recorder(output)])
    except BaseException:  # noqa: BLE001
        status = 70
    os._exit(int(status))


def _end(child: int) -> None:
    """End what is left of pytest and of what its tests have started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
            try:
                os.killpg(child, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def table(mutants: list[Mutant], findings: Findings) -> str:
    """By room how many breaks were found, as Markdown, and those that were not."""
    lines = ["| room | breaks | found by its unit tests | by others | not found |", "|---|--:|--:|--:|--:|"]
    rooms = {mutant.room: [one for one in mutants if one.room == mutant.room] for mutant in mutants}
    for room, ones in {**rooms, "all": mutants}.items():
        by_unit = sum(bool(findings.known.get((one, one.unit_tests))) for one in ones)
        found = sum(bool(findings.of(one)) for one in ones)
        lines.append(f"| {room} | {len(ones)} | {by_unit} | {found - by_unit} | {len(ones) - found} |")
    lines += ["", f"{100 * found / len(mutants):.0f} % found. Not found:", ""]
    for one in mutants:
        if not findings.of(one):
            tried = ", ".join(tests for known, tests in findings.known if known == one)
            lines.append(
                f"- {one.file}: `{one.original.strip()}` -> `{one.replacement.strip()}`, not by {tried or '?'}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
