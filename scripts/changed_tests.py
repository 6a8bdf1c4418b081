"""Print the tests for a change: of the rooms that it touches and of the rooms above them.

    pytest $(python scripts/changed_tests.py)         # uncommitted changes, else the last commit
    pytest $(python scripts/changed_tests.py main)    # since the branch left main

The layers in pyproject.toml define the rooms and their order. pytest-testmon would need a traced
run of all tests first, and does not see what other processes import.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

UNIT = Path("tests/unit")


def refuse(problem: str) -> NoReturn:
    """Print one line and exit with status 2."""
    print(f"test-changed: {problem}", file=sys.stderr)
    sys.exit(2)


def git(*words: str) -> str:
    """Return the output of git."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        refuse("git is not on PATH: install it, or run make test")
    if done.returncode != 0:
        refuse(f"git {' '.join(words)}: {(done.stderr.splitlines() or ['nothing in common'])[0]}")
    return done.stdout


def changes(since: str | None) -> tuple[str, list[Path]]:
    """Return the commit to compare with, and the files that differ from it, including untracked and deleted ones."""
    names = git("ls-files", "--others", "--exclude-standard", "-z")
    if since:
        commit = git("merge-base", "HEAD", since).strip()
    elif git("diff", "--name-only", "HEAD", "--"):
        commit = "HEAD"
    else:
        commit = git("rev-list", "--first-parent", "--max-count=2", "HEAD").split()[-1]
    names += git("diff", "--name-only", "--no-renames", "--relative", "-z", commit, "--")
    return git("show", "--no-patch", "--format=%h (%s)", commit).strip(), sorted(map(Path, names.split("\0")[:-1]))


def heights(pyproject: str) -> dict[str, dict[str, int]]:
    """Return the height of each package's rooms, from the lowest layer up."""
    contracts = tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    return {
        package: {room: n for n, layer in enumerate(reversed(one["layers"])) for room in re.split(r"\s*\|\s*", layer)}
        for one in contracts
        if "containers" in one
        for package in one["containers"]
    }


def rooms_of(files: Collection[Path], packages: Mapping[str, Mapping[str, int]]) -> dict[str, list[str]]:
    """Return the rooms of each package that these files touch and those above them, lowest first."""
    chosen = {}
    for package, height in packages.items():
        inside = [file for file in files if file.parts[0] == package and (len(file.parts) > 2 or file.suffix == ".py")]
        touched = {file.parts[1].removesuffix(".py"): file for file in inside}
        for room, file in touched.items():
            if room not in {*height, "__init__"} and file.exists():
                refuse(f"{file}: no layer of {package} in pyproject.toml has the room {room}")
        lowest = min((height.get(room, -1) for room in touched), default=len(height))
        chosen[package] = [room for room in height if room in touched or height[room] > lowest]
    return {package: rooms for package, rooms in chosen.items() if rooms}


def choose_tests(rooms: Mapping[str, Collection[str]], files: Collection[Path]) -> list[Path]:
    """Return the tests of these rooms (in their folders, or naming them), of the whole project, and changed ones."""
    folders = [UNIT / room for inside in rooms.values() for room in inside]
    folders += [file.parent for file in files if file.is_relative_to(UNIT) and not file.match("test_*.py")]
    folders += [Path("tests/setup") for file in files if file.parts[0] == "scripts"]
    names = [rf"\b{package}(\.| import .*\b)({'|'.join(inside)})\b" for package, inside in rooms.items()]
    return sorted(
        {
            *UNIT.glob("test_*.py"),
            *(file for file in files if file.parts[0] == "tests" and file.match("test_*.py") and file.exists()),
            *(test for folder in folders for test in folder.rglob("test_*.py")),
            *(test for test in UNIT.rglob("test_*.py") if any(re.search(name, test.read_text()) for name in names)),
        }
    )


def main(since: str | None = None) -> None:
    """Print the tests; on standard error print the base, the rooms, and what is left out."""
    commit, files = changes(since)
    packages = heights(Path("pyproject.toml").read_text())
    rooms = rooms_of(files, packages)
    tests = choose_tests(rooms, files)
    print(*tests)
    chosen = "; ".join(f"{package}: {', '.join(inside)}" for package, inside in rooms.items())
    print(f"test-changed: since {commit}; rooms of {chosen or 'no package'}", file=sys.stderr)
    has_tests = re.compile(rf"({'|'.join(packages)}|scripts|tests/unit)/|.*/test_\w+\.py$|.*\.md$")
    left = [str(file) for file in files if not has_tests.match(str(file))]
    also = ["other rooms", "tests/mpi", "tests/setup", "tests/browser"]
    print(f"test-changed: left to make test: {', '.join(left + also)}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
