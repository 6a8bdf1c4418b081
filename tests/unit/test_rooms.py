"""The rooms of both packages: each says what lives there, and CONTRIBUTING.md says the same."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from hvdtrain.insight.tracking import environment
from scripts import check_loads

PROJECT = Path(__file__).parents[2]
CODE = [file for package in ("hvdtrain", "launch") for file in (PROJECT / package).rglob("*.py")]
ROOMS = sorted(
    file.parent.relative_to(PROJECT) for file in CODE if file.name == "__init__.py" and file.parent.parent != PROJECT
)


def test_a_room_says_in_one_line_what_lives_there():
    contributing = (PROJECT / "CONTRIBUTING.md").read_text()
    for room in ROOMS:
        tree = ast.parse((PROJECT / room / "__init__.py").read_text())
        says = ast.get_docstring(tree)
        assert says is not None, room
        assert (len(tree.body), len(says.splitlines())) == (1, 1), room
        package, _, name = str(room).partition("/")
        table = contributing.partition(f"| `{package}/` |")[2].partition("\n\n")[0]
        assert f"| `{name}/` | {says} |" in table.splitlines()


def test_a_room_has_at_most_about_ten_files():
    counts = {str(room): len(list((PROJECT / room).glob("*.py"))) for room in ROOMS}
    assert {room: count for room, count in counts.items() if count > 15} == {}


def test_every_folder_with_code_is_a_room():
    folders = {file.parent.relative_to(PROJECT) for file in CODE}
    assert folders - {Path("hvdtrain"), Path("launch")} == set(ROOMS)


def test_every_room_is_packaged():
    packages: list[str] = []
    for folder in (PROJECT, PROJECT / "packaging" / "hvdlaunch"):
        config = tomllib.loads((folder / "pyproject.toml").read_text())
        packages += find_packages(str(folder), **config["tool"]["setuptools"]["packages"]["find"])
    assert sorted(Path(*name.split(".")) for name in packages) == sorted([Path("hvdtrain"), Path("launch"), *ROOMS])


def test_the_code_hash_sees_a_change_in_any_room(tmp_path, monkeypatch):
    rooms = [room for room in ROOMS if room.parts[0] == "hvdtrain"]
    for room in rooms:
        (tmp_path / room).mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "hvdtrain" / "insight" / "tracking" / "environment.py"))
    hashes = {environment.code_hash.__wrapped__()}
    for room in rooms:
        (tmp_path / room / "__init__.py").write_text("# changed\n")
        hashes.add(environment.code_hash.__wrapped__())
    assert len(hashes) == len(rooms) + 1


# A process that is started after MPI_Init is not safe, and one that nobody ends is left behind.
# Of multiprocessing not what looks after the loader workers, which torch starts, nor what pickles for them.
STARTS = re.compile(
    r"(subprocess|_posixsubprocess|multiprocessing(?!\.(active_children|resource_tracker|reduction|context\.set_spawning_popen)\b)"
    r"|torch\.multiprocessing|concurrent\.futures\.process|pty)(\.\w+)*"
    r"|concurrent\.futures\.ProcessPoolExecutor|asyncio\.create_subprocess_\w+"
    r"|(os|posix)\.(system|popen|fork|forkpty|(posix_)?spawn\w*)"
    r"|platform\.(platform|processor|uname|architecture)"  # they ask the programs uname and file
)
HINT = re.compile(r"rocess|pty|system|popen|fork|spawn|platform")  # in every name of what starts one
# What starts a rank, imports for it or keeps its words forks before the rank is anything that may not fork.
MAY_START = {PROJECT / "launch" / "process.py"}
MAY_START |= {PROJECT / "launch" / "run" / "rank" / name for name in ("forwarder.py", "keeper.py", "stand_in.py")}


def starters(source):
    """The names in a file of what starts processes."""
    tree = ast.parse(source)
    imported = check_loads._imported(tree)
    named = {check_loads._name(node, imported) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    found = {name for name in {*named, *imported.values()} if name}
    return {name for name in found if STARTS.fullmatch(name)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n    from subprocess import run", "subprocess.run"),
        ("from os import fork as split\nsplit()", "os.fork"),
        ("import torch.multiprocessing as mp\nmp.spawn(f)", "torch.multiprocessing"),
        ("import platform\nname = platform.processor()", "platform.processor"),
    ],
)
def test_what_starts_a_process_is_seen(source, found):
    assert HINT.search(source)
    assert found in starters(source)


def test_few_files_start_processes():
    sources = {file: source for file in CODE if HINT.search(source := file.read_text())}
    assert {file for file, source in sources.items() if starters(source)} == MAY_START


def test_a_variable_that_is_not_for_users_is_private_by_name():
    named = {name for file in CODE for name in re.findall(r'"(_?HVDTRAIN_[A-Z_]+)"', file.read_text())}
    assert {name for name in named if not name.startswith("_")} == {"HVDTRAIN_COMMIT", "HVDTRAIN_FAULT"}


def test_every_bench_that_is_named_is_there():
    files = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files += [*(PROJECT / "docs").rglob("*.md"), *(PROJECT / "bench").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    assert {name for name in re.findall(r"bench/[\w/]+\.py", text) if not (PROJECT / name).exists()} == set()
    [short] = re.findall(r"^SHORT := (.*?)\nbench:", (PROJECT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
    named = {words.split()[0].strip('"') for words in re.findall(r'"[^"]+"|[\w-]+', short)}
    named |= set(re.findall(r"python bench/run\.py ([a-z-]+)", text))
    assert len(named) > 10
    cases = "\n".join(file.read_text() for file in (PROJECT / "bench" / "cases").glob("*.py"))
    assert named <= set(re.findall(r'"([a-z-]+)": Case\(', cases))
