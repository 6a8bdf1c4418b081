"""What make test-changed runs, in git repositories of this test's own."""

import os
import shutil
from pathlib import Path

import pytest

from scripts.changed_tests import changes, choose_tests, git, heights, main, rooms_of

PROJECT = Path(__file__).parents[2]
LAYERS = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["house"]
layers = ["script | other", "top", "middle | beside", "low"]

[[tool.importlinter.contracts]]
type = "forbidden"
source_modules = ["house.low"]
forbidden_modules = ["torch"]

[[tool.importlinter.contracts]]
type = "layers"
containers = ["barn"]
layers = ["roof", "floor"]
"""
EVERYTHING = ["low", "middle", "beside", "top", "script", "other"]
FILES = {
    "pyproject.toml": LAYERS,
    "house/__init__.py": "",
    "house/script.py": "",
    "house/low/one.py": "",
    "barn/floor/one.py": "",
    "tests/setup/test_build.py": "",
    "tests/mpi/test_ranks.py": "",
    "tests/unit/test_whole.py": "",
    "tests/unit/low/test_one.py": "import house.low.one",
    "tests/unit/low/test_by_top.py": "from house.top import one",
    "tests/unit/low/test_by_script.py": "from house import other, script",
    "tests/unit/top/test_top.py": "",
    "tests/unit/floor/test_floor.py": "# houses.top is of another house",
}


def write(name, text="changed"):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def commit(message):
    git("add", "--all")
    git("commit", "--quiet", f"--message={message}")


@pytest.fixture
def house(tmp_path, monkeypatch):
    """FILES in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        write(name, text)


@pytest.mark.parametrize(
    ("files", "rooms"),
    [
        (["house/script.py"], {"house": ["script"]}),
        (["house/beside/one.py", "house/middle/data.csv"], {"house": ["middle", "beside", "top", "script", "other"]}),
        (["house/__init__.py"], {"house": EVERYTHING}),
        (["house/gone/one.py"], {"house": EVERYTHING}),
        (["house/other.py", "barn/roof/one.py"], {"house": ["other"], "barn": ["roof"]}),
        (["README.md", "house/.script.py.swp", "docs/house/low.py"], {}),
    ],
)
def test_a_change_chooses_its_room_and_those_above(files, rooms):
    assert rooms_of([Path(file) for file in files], heights(LAYERS)) == rooms


def test_the_contracts_of_this_project_are_read():
    packages = heights((PROJECT / "pyproject.toml").read_text())
    assert packages.keys() == {"hvdtrain", "launch"}
    rooms = {path.parent.name for path in PROJECT.glob("hvdtrain/*/__init__.py")}
    assert rooms < set(rooms_of([Path("hvdtrain/safety/exits.py")], packages)["hvdtrain"])


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("README.md", []),
        ("house/top/one.py", ["unit/low/test_by_script.py", "unit/low/test_by_top.py", "unit/top/test_top.py"]),
        ("scripts/build.sh", ["setup/test_build.py"]),
        ("tests/mpi/test_ranks.py", ["mpi/test_ranks.py"]),
        ("tests/unit/top/helper.py", ["unit/top/test_top.py"]),
    ],
)
def test_a_rooms_tests_are_in_its_folder_or_name_it(house, changed, tests):
    found = choose_tests(rooms_of([Path(changed)], heights(LAYERS)), [Path(changed)])
    assert {str(test) for test in found} == {*(f"tests/{test}" for test in tests), "tests/unit/test_whole.py"}


@pytest.fixture
def repository(house, monkeypatch):
    """FILES in a commit, a change of the barn in another, and one of the house in a branch off the first."""
    if shutil.which("git") is None:
        pytest.skip("git is not on PATH")
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # in a hook they name another repository
        monkeypatch.delenv(name)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "me")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "me@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git("init", "--quiet", "--initial-branch=main")
    commit("first")
    write("barn/floor/one.py")
    commit("second")
    git("switch", "--quiet", "--create", "mine", "HEAD^")
    write("house/top/one.py")
    commit("third")
    git("switch", "--quiet", "main")


def compared(since=None):
    commit, files = changes(since)
    return commit.partition(" ")[2], list(map(str, files))


def test_what_is_not_committed_is_compared_with_the_last_commit_and_that_with_its_first_parent(repository):
    assert compared() == ("(first)", ["barn/floor/one.py"])
    assert compared("mine") == ("(first)", ["barn/floor/one.py"])
    git("merge", "--quiet", "--no-edit", "mine")
    assert compared() == ("(second)", ["house/top/one.py"])
    write("house/top/new one.py")
    Path("house/script.py").rename("house/other.py")
    git("add", "house/other.py")
    files = ["house/other.py", "house/script.py", "house/top/new one.py"]
    assert compared() == ("(Merge branch 'mine')", files)


def test_it_prints_the_tests_and_says_what_it_has_chosen(repository, capsys):
    for name in ("house/top/one.py", "barn/roof/one.py", "Makefile", "docs/new.md"):
        write(name)
    main("HEAD")
    said = capsys.readouterr()
    assert said.out.split()[-2:] == ["tests/unit/test_whole.py", "tests/unit/top/test_top.py"]
    first, second = said.err.splitlines()
    assert first.endswith(" (second); rooms of house: top, script, other; barn: roof")
    assert second == "test-changed: left to make test: Makefile, other rooms, tests/mpi, tests/setup, tests/browser"


def refusal(capsys, *words):
    """The one line with which it ends."""
    with pytest.raises(SystemExit) as ended:
        main(*words)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    [line] = said.err.splitlines()
    return line.removeprefix("test-changed: ")


def test_a_room_in_no_layer_and_what_git_cannot_do_end_it_in_one_line(repository, monkeypatch, capsys):
    write("house/new/one.py")
    assert refusal(capsys) == "house/new/one.py: no layer of house in pyproject.toml has the room new"
    assert refusal(capsys, "nowhere").startswith("git merge-base HEAD nowhere: fatal: Not a valid object name")
    monkeypatch.setenv("PATH", "")
    assert refusal(capsys) == "git is not on PATH: install it, or run make test"
