"""What make test-changed runs."""

from pathlib import Path

import pytest

from scripts.changed_tests import choose_tests, heights, rooms_of

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
    assert rooms < set(rooms_of([Path("hvdtrain/settings/safety/exits.py")], packages)["hvdtrain"])


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
