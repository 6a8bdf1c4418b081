"""The environment of make test-peers, and the tables of docs/reference/peers.md, which a session writes."""

import json
import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
NEEDED = ("lightning", "accelerate", "transformers", "deepspeed", "mpi4py")
MISSING = [name for name in NEEDED if find_spec(name) is None]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.peers)
    item.add_marker(pytest.mark.timeout(2000))
    reason = f"not installed: {', '.join(MISSING)}. make test-peers sets up .venv-peers"
    item.add_marker(pytest.mark.skipif(bool(MISSING), reason=reason))


@pytest.fixture(scope="session")
def tables() -> Iterator[dict[str, dict[str, dict[str, object]]]]:
    """The rows of each table by their first cell; at the end in build/bench/, as bench/results has them."""
    questions = {
        "peers": "Does a program behave under hvdlaunch as under torchrun? Statuses: torchrun's, hvdlaunch's",
        "peers-mpi4py": "Does mpi4py's own test suite end under hvdlaunch as under mpirun?",
    }
    found: dict[str, dict[str, dict[str, object]]] = {name: {} for name in questions}
    yield found
    about = {"Python": platform.python_version(), "torch": version("torch"), "ranks": "2"}
    about["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    folder = PROJECT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    for name in filter(found.get, found):
        columns = dict.fromkeys(column for row in found[name].values() for column in row)
        rows = [{column: row.get(column) for column in columns} for row in found[name].values()]
        result = {"question": questions[name], "about": about, "n": 1, "command": "make test-peers", "rows": rows}
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


@pytest.fixture
def note(tables) -> Callable[..., None]:
    """Note a cell of a row, before anything is asserted of it."""

    def put(table: str, row: dict[str, object], **cells: object) -> None:
        first = str(next(iter(row.values())))
        named = {name.replace("_", " "): cell for name, cell in cells.items()}
        tables[table].setdefault(first, dict(row)).update(named)

    return put
