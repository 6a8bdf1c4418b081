"""The rooms of both packages: each says what lives there, and CONTRIBUTING.md says the same."""

import ast
import shutil
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from hvdtrain.record import environment

PROJECT = Path(__file__).parents[2]
ROOMS = sorted(
    path.parent.relative_to(PROJECT)
    for package in ("hvdtrain", "launch")
    for path in (PROJECT / package).rglob("__init__.py")
    if path.parent.parent != PROJECT
)


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_says_in_one_line_what_lives_there(room):
    tree = ast.parse((PROJECT / room / "__init__.py").read_text())
    says = ast.get_docstring(tree)
    assert says is not None
    assert (len(tree.body), len(says.splitlines())) == (1, 1)
    package, _, name = str(room).partition("/")
    table = (PROJECT / "CONTRIBUTING.md").read_text().partition(f"| `{package}/` |")[2].partition("\n\n")[0]
    assert f"| `{name}/` | {says} |" in table.splitlines()


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_has_at_most_about_ten_files(room):
    assert len(list((PROJECT / room).glob("*.py"))) <= 15


def test_every_folder_with_code_is_a_room():
    folders = {
        path.parent.relative_to(PROJECT)
        for package in ("hvdtrain", "launch")
        for path in (PROJECT / package).rglob("*.py")
    }
    assert folders - {Path("hvdtrain"), Path("launch")} == set(ROOMS)


def test_every_room_is_packaged():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    packages = find_packages(str(PROJECT), **config["tool"]["setuptools"]["packages"]["find"])
    assert {Path(*name.split(".")) for name in packages} == {Path("hvdtrain"), Path("launch"), *ROOMS}


def test_the_code_hash_sees_a_change_in_any_room(tmp_path, monkeypatch):

    shutil.copytree(PROJECT / "hvdtrain", tmp_path / "hvdtrain")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "hvdtrain" / "record" / "environment.py"))
    hashes = [environment.code_hash()]
    for room in (one for one in ROOMS if one.parts[0] == "hvdtrain"):
        with (tmp_path / room / "__init__.py").open("a") as file:
            file.write("# changed\n")
        hashes.append(environment.code_hash())
    assert len(set(hashes)) == len(hashes)
