"""What `rocm-smi --showtopo` prints -> a topology."""

import re
from dataclasses import dataclass, field
from typing import NoReturn

from launch.errors import TopologyError
from launch.machine.topology import Gpu, Link, Topology

_MATRICES = {
    "Weight between two GPUs": r"[0-9]{1,6}",
    "Hops between two GPUs": r"[0-9]{1,3}",
    "Link Type between two GPUs": r"0|XGMI|PCIE",
}
_LINKS = "Link Type between two GPUs"
_NUMA = "Numa Nodes"
_FRAME = ("ROCm System Management Interface", "End of ROCm SMI Log")
_NUMA_LINE = re.compile(r"GPU ?\[?([0-9]{1,4})\]?\s*: \(Topology\) Numa (Node|Affinity): (-?[0-9]{1,5})")


@dataclass
class _Matrix:
    line: int  # of its title, from 1
    columns: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)


def parse(text: str, *, name: str) -> Topology:
    """Read what `rocm-smi --showtopo` has printed.

    It tells PCIe from XGMI, but not which bridges a PCIe path crosses: two GPUs of one NUMA node get NODE, the farthest
    that they can be apart, all others SYS. No speed is known.

    Raises:
        TopologyError: anything in the text that is not understood, with file, line and what was expected.
    """
    matrices: dict[str, _Matrix] = {}
    numa: dict[int, dict[str, int]] = {}
    title = ""
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("WARNING:") or re.fullmatch("=+", stripped):
            continue
        if match := re.fullmatch(r"=+ (.+?) =+", stripped):
            title = match[1]
            if title in matrices or title not in {*_MATRICES, _NUMA, *_FRAME}:
                _wrong(name, number, f"section {title[:60]!r}", f"once each of {', '.join((*_MATRICES, _NUMA))}")
            if title in _MATRICES:
                matrices[title] = _Matrix(line=number)
        elif title == _NUMA:
            _add_numa(name, number, stripped, numa)
        elif title in _MATRICES:
            _add_row(name, number, stripped, matrices[title], _MATRICES[title])
        else:
            _wrong(name, number, f"found {stripped[:60]!r}", "a section of `rocm-smi --showtopo`")
    if _LINKS not in matrices:
        raise TopologyError(f"{name}: no section '{_LINKS}'; expected what `rocm-smi --showtopo` prints")
    for matrix in matrices.values():
        _check_square(name, matrix, matrices[_LINKS].columns)
    return _topology(name, matrices[_LINKS], numa)


def _wrong(name: str, number: int, found: str, expected: str) -> NoReturn:
    raise TopologyError(f"{name}:{number}: {found}; expected {expected}")


def _add_row(name: str, number: int, line: str, matrix: _Matrix, word: str) -> None:
    label, *cells = line.split()
    if not matrix.columns:
        matrix.columns = [label, *cells]
        for column in matrix.columns:
            if not re.fullmatch(r"GPU[0-9]{1,4}", column) or matrix.columns.count(column) > 1:
                _wrong(name, number, f"column {column[:40]!r}", "a header such as GPU0 GPU1, each GPU once")
        return
    if label not in matrix.columns or label in matrix.rows:
        _wrong(name, number, f"row {label[:40]!r}", "one row for each GPU of the header")
    if len(cells) != len(matrix.columns):
        _wrong(name, number, f"{label} has {len(cells)} cells", f"{len(matrix.columns)}, one for each GPU")
    for column, cell in zip(matrix.columns, cells, strict=True):
        if not re.fullmatch(word, cell) or (cell == "0") != (column == label):
            _wrong(
                name, number, f"{label}-{column} says {cell[:40]!r}", f"{word.replace('|', ', ')}; 0 for itself alone"
            )
    matrix.rows[label] = cells


def _add_numa(name: str, number: int, line: str, numa: dict[int, dict[str, int]]) -> None:
    match = _NUMA_LINE.fullmatch(line)
    if not match or match[2] in numa.get(int(match[1]), {}):
        _wrong(
            name, number, f"found {line[:60]!r}", "'GPU[0] : (Topology) Numa Node: 0' or Affinity, once for each GPU"
        )
    numa.setdefault(int(match[1]), {})[match[2]] = int(match[3])


def _check_square(name: str, matrix: _Matrix, columns: list[str]) -> None:
    if not matrix.columns or matrix.columns != columns:
        _wrong(name, matrix.line, f"columns {matrix.columns}", f"the GPUs of '{_LINKS}': {columns}")
    for a in columns:
        if a not in matrix.rows:
            _wrong(name, matrix.line, f"no row of {a}", "a row for each GPU")
    for i, a in enumerate(columns):
        for j, b in enumerate(columns[:i]):
            if matrix.rows[a][j] != matrix.rows[b][i]:
                differ = f"{a}-{b} says {matrix.rows[a][j]}, {b}-{a} says {matrix.rows[b][i]}"
                _wrong(name, matrix.line, differ, "the same both ways")


def _topology(name: str, matrix: _Matrix, numa: dict[int, dict[str, int]]) -> Topology:
    places = sorted(range(len(matrix.columns)), key=lambda place: int(matrix.columns[place][3:]))
    indices = [int(matrix.columns[place][3:]) for place in places]
    if odd := sorted(set(numa) - set(indices)):
        raise TopologyError(f"{name}: section '{_NUMA}' has GPU {odd[0]}, which no table has")

    def nodes(index: int) -> tuple[int, ...]:
        known = numa.get(index, {})
        stated = [node for node in (known.get("Affinity"), known.get("Node")) if node is not None and node >= 0]
        return tuple(stated[:1])

    def between(a: int, b: int) -> Link:
        word = matrix.rows[matrix.columns[a]][b]
        if a == b:
            return Link(kind="X")
        if word == "XGMI":
            return Link(kind="XGMI", count=1)
        near_a, near_b = (nodes(int(matrix.columns[place][3:])) for place in (a, b))
        return Link(kind="NODE" if near_a and near_a == near_b else "SYS")

    return Topology(
        source=name,
        gpus=tuple(Gpu(index=index, numa=nodes(index)) for index in indices),
        links=tuple(tuple(between(a, b) for b in places) for a in places),
    )
