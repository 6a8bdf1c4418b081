"""Output of nvidia-smi -> a topology: `topo -m`, `topo -p2p`, `--query-gpu` and `--query-compute-apps`."""

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from launch.cores import parse_cores
from launch.errors import TopologyError, harmless
from launch.machine.speeds import Speeds, link, speeds_by_name
from launch.machine.topology import P2P_WORDS, Gpu, Link, Nic, PeerAccess, Topology, why_unusable

QUERY = "index,uuid,name,pci.bus_id,mig.mode.current"
QUERY_APPS = "gpu_uuid,pid"
SOURCE = "nvidia-smi"

# nvidia-smi underlines its header; text copied from a browser has often lost only the escape character.
_ESCAPES = re.compile(r"\x1b?\[[0-9;]*m")
_AFFINITY = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
# A GPU that has fallen off its bus: "... for GPU0000:41:00.0: GPU is lost. ...", "... for GPU1: 0000:C1:00.0: Unknown"
LOST = re.compile(r"Unable to determine the device handle for gpu ?(?:(\d+): )?([\da-f:.]+): (.+)", re.IGNORECASE)
_LINK_WORDS = "X, NV1, NV2, ..., PIX, PXB, PHB, NODE, SYS"
_TAB = 8


@dataclass(frozen=True, kw_only=True)
class _Header:
    devices: tuple[str, ...]  # GPU0, GPU1, ..., then NICs, in the order of the columns
    affinities: tuple[str, ...]  # the titles of the columns after them


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int  # of the line, from 1
    words: tuple[str, ...]  # one for each device
    affinity: dict[str, str]  # CPU Affinity, NUMA Affinity, GPU NUMA ID: those present in the row


def parse(text: str, *, name: str, gpu_name: str | None = None) -> Topology | PeerAccess:
    """Parse the output of `nvidia-smi topo -m` or `nvidia-smi topo -p2p`.

    Args:
        text: the output, with tabs or spaces; NIC rows and legends may be cut off.
        name: of the file, for messages and for `Topology.source`.
        gpu_name: the model, which is not in the text; without it speeds are unknown.

    Raises:
        TopologyError: any text that is not understood, with file, line and the expected text.
    """
    lines = [
        (number, _ESCAPES.sub("", line).expandtabs(_TAB).rstrip())
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
    ]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise TopologyError(f"{name}: empty; expected what `nvidia-smi topo -m` prints")
    end = next((i for i, (_, line) in enumerate(lines) if line.strip() in {"Legend:", "NIC Legend:"}), len(lines))
    header = _header(name, *lines[0], labels=[line.split()[0] for _, line in lines[1:end]])
    rows: dict[str, _Row] = {}
    for number, line in lines[1:end]:
        label = line.split()[0]
        if label not in header.devices:
            _wrong(name, number, f"found {label[:40]!r}", "a row of one of the header's devices, or 'Legend:'")
        if label in rows:
            _wrong(name, number, f"{label} appears twice", "one row for each device")
        rows[label] = _row(name, number, line, header)
    words, nic_names = _legends(name, lines[end:])
    gpus = sorted((device for device in header.devices if _is_gpu(device)), key=lambda gpu: int(gpu[3:]))
    for missing in [gpu for gpu in gpus if gpu not in rows]:
        _wrong(name, lines[end - 1][0], f"the table ends without a row of {missing}", "a row for each GPU")
    if "OK" in words or any(word in P2P_WORDS for row in rows.values() for word in row.words):
        return _peer_access(name, gpus, header, rows)
    topology = _topology(
        name, gpus, header, rows, nic_names=nic_names, speeds=speeds_by_name(gpu_name or "") or Speeds()
    )
    return replace(topology, gpus=tuple(replace(gpu, name=gpu_name) for gpu in topology.gpus))


def _wrong(name: str, number: int, problem: str, expected: str) -> NoReturn:
    raise TopologyError(f"{name}:{number}: {problem}; expected {expected}")


def _is_gpu(device: str) -> bool:
    return re.fullmatch(r"GPU[0-9]{1,4}", device) is not None


def _header(name: str, number: int, line: str, *, labels: list[str]) -> _Header:
    titles = list(_AFFINITY.finditer(line))
    devices = line[: titles[0].start()].split() if titles else line.split()
    if "".join(devices) == "".join(labels):
        devices = labels  # old drivers, and terminals, omit the space between the header's names
    affinities = tuple(" ".join(match[0].split()) for match in titles)
    between = _AFFINITY.sub("", line[titles[0].start() :]) if titles else ""
    if not any(_is_gpu(device) for device in devices) or between.strip():
        _wrong(
            name,
            number,
            f"found {line.strip()[:60]!r}",
            "the header of `nvidia-smi topo -m`: GPU0 GPU1 ..., NICs, CPU Affinity, NUMA Affinity, GPU NUMA ID",
        )
    for device in devices:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", device) or (device.startswith("GPU") and not _is_gpu(device)):
            _wrong(name, number, f"column {device[:40]!r}", "GPU<n> or the name of a NIC such as mlx5_0 or NIC0")
    columns = [*(int(d[3:]) if _is_gpu(d) else d for d in devices), *affinities]
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        _wrong(name, number, f"{f'GPU{twice}' if isinstance(twice, int) else twice} appears twice", "each column once")
    return _Header(devices=tuple(devices), affinities=affinities)


def _row(name: str, number: int, line: str, header: _Header) -> _Row:
    label, *cells = list(re.finditer(r"\S+", line))
    width = len(header.devices)
    tail = cells[width:]
    most = len(header.affinities) if _is_gpu(label[0]) else 0
    if len(cells) < width or len(tail) > most:
        _wrong(
            name,
            number,
            f"{label[0]} has {len(cells)} cells",
            f"{width}, one for each GPU and NIC of the header" + (f", and up to {most} of affinity" if most else ""),
        )
    # Cells may be missing at the end, if nvidia-smi does not know them. In a container without a core near the GPU the
    # first one is empty, which leaves a tab or more before the next; if another one is also missing, the row is
    # ambiguous. An empty cell in the middle leaves more than the two tabs before the last.
    titles = header.affinities
    if tail and len(tail) < most and tail[0].start() - cells[width - 1].end() >= _TAB:
        titles = titles[1:] if len(tail) == most - 1 else ()
    elif len(tail) == most - 1 == 2 and tail[1].start() - tail[0].end() > 2 * _TAB:
        titles = titles[::2]
    affinity = {title: cell[0] for title, cell in zip(titles, tail, strict=False)}
    return _Row(number=number, words=tuple(cell[0] for cell in cells[:width]), affinity=affinity)


def _legends(name: str, lines: list[tuple[int, str]]) -> tuple[set[str], dict[str, str]]:
    """Return the link types that the legend explains, and the NICs' real names."""
    words: set[str] = set()
    nics: dict[str, str] = {}
    title = ""
    for number, line in lines:
        if line.strip() in {"Legend:", "NIC Legend:"}:
            title = line.strip()
        elif title == "Legend:" and (match := re.fullmatch(r"\s*([A-Z]+#?)\s+=\s+\S.*", line)):
            words.add(match[1])
        elif title == "NIC Legend:" and (match := re.fullmatch(r"\s*([A-Za-z0-9_.-]+):\s+([A-Za-z0-9_.-]+)", line)):
            if match[1] in nics or match[2] in nics.values():
                _wrong(name, number, f"{line.strip()!r} is there already", "each NIC once")
            nics[match[1]] = match[2]
        else:
            _wrong(name, number, f"found {line.strip()[:60]!r}", "'WORD = meaning', or 'NIC0: name' in the NIC legend")
    return words, nics


def _peer_access(name: str, gpus: list[str], header: _Header, rows: dict[str, _Row]) -> PeerAccess:
    matrix = []
    for a in gpus:
        access = dict(zip(header.devices, rows[a].words, strict=True))
        for b, word in access.items():
            if (word == "X") != (a == b) or (word != "X" and word not in P2P_WORDS):
                _wrong(name, rows[a].number, f"{a}-{b} says {word[:40]!r}", f"{', '.join(P2P_WORDS)}; X for itself")
        matrix.append(tuple(access[b] for b in gpus))
    return PeerAccess(source=name, gpus=tuple(int(gpu[3:]) for gpu in gpus), words=tuple(matrix))


def _topology(
    name: str, gpus: list[str], header: _Header, rows: dict[str, _Row], *, nic_names: dict[str, str], speeds: Speeds
) -> Topology:
    nics = [device for device in header.devices if not _is_gpu(device)]
    rowless = [nic for nic in nics if nic not in rows]
    if rowless and len(rowless) < len(nics):
        _wrong(
            name, max(row.number for row in rows.values()), f"no row of {rowless[0]}", "rows of all NICs, or of none"
        )
    if nic_names and set(nic_names) != set(nics):
        odd = sorted(set(nic_names) ^ set(nics))[0]
        raise TopologyError(f"{name}: {odd} is in the header or in the NIC legend alone; expected it in both")
    words = {
        (a, b): _link_word(name, row.number, a, b, word)
        for a, row in rows.items()
        for b, word in zip(header.devices, row.words, strict=True)
    }
    for (a, b), word in words.items():
        if words.get((b, a), word) != word:
            later_line = rows[a].number if rows[a].number > rows[b].number else rows[b].number
            shown = [f"{kind}{count or ''}" for kind, count in (word, words[b, a])]
            _wrong(name, later_line, f"{a}-{b} says {shown[0]}, {b}-{a} says {shown[1]}", "the same both ways")
    ends = (speeds, speeds)
    return Topology(
        source=name,
        gpus=tuple(_gpu(name, gpu, rows[gpu]) for gpu in gpus),
        links=tuple(tuple(link(*words[a, b], ends, None) for b in gpus) for a in gpus),
        nics=tuple(
            Nic(name=nic_names.get(nic, nic), links=tuple(Link(kind=words[gpu, nic][0]) for gpu in gpus))
            for nic in nics
        ),
    )


def _link_word(name: str, number: int, a: str, b: str, word: str) -> tuple[str, int]:
    """Parse the kind and number of links."""
    match = re.fullmatch(r"NV([1-9][0-9]{0,2})", word)
    if word == "X" and a == b:
        return "X", 0
    if a != b and match and _is_gpu(a) and _is_gpu(b):
        return "NV", int(match[1])
    if a != b and word in {"PIX", "PXB", "PHB", "NODE", "SYS", "SOC"}:
        return "SYS" if word == "SOC" else word, 0  # SOC: its name in drivers before 2017
    _wrong(name, number, f"{a}-{b} says {word[:40]!r}", f"{_LINK_WORDS}; X for a device and itself")


def _gpu(name: str, device: str, row: _Row) -> Gpu:
    def numbers(title: str) -> tuple[int, ...]:
        text = row.affinity.get(title, "N/A")
        try:
            return () if text == "N/A" else parse_cores(text)
        except TopologyError as error:
            raise TopologyError(f"{name}:{row.number}: {title} of {device}: {error}") from None

    numbers("GPU NUMA ID")  # the GPU's memory as a NUMA node: not usable for binding, but it must be a number
    return Gpu(index=int(device[3:]), cores=numbers("CPU Affinity"), numa=numbers("NUMA Affinity"))


def from_nvidia_smi(
    matrix: str | None, query: str | None = None, apps: str | None = None, *, sockets_gbps: float | None = None
) -> Topology:
    """Return this machine's topology from three outputs of nvidia-smi.

    Args:
        matrix: of `nvidia-smi topo -m`; None if it fails, as for a lost GPU: the links count as the slowest.
        query: of `nvidia-smi --query-gpu=<QUERY> --format=csv,noheader`; without it UUIDs and names stay None.
        apps: of `nvidia-smi --query-compute-apps=<QUERY_APPS> --format=csv,noheader`.
        sockets_gbps: GB/s between the CPU sockets; None if unknown.

    Raises:
        TopologyError: an output is not understood, or they describe different GPUs.
    """
    bare: Topology | PeerAccess = Topology(source=SOURCE)
    if matrix is not None:
        bare = parse(LOST.sub("", matrix), name="nvidia-smi topo -m")
    if isinstance(bare, PeerAccess):
        raise TopologyError(f"{bare.source}: printed what topo -p2p prints; expected the table of topo -m")
    bare = replace(bare, source=SOURCE)
    if query is None:
        return bare
    facts = _facts(query, _pids(LOST.sub("", apps or "")))
    listed = {gpu.index for gpu in bare.gpus}
    bare = _with_lost(bare, [i for i in facts if i not in listed and (matrix is None or _is_lost(facts[i]))])
    indices = [gpu.index for gpu in bare.gpus]
    if sorted(facts) != indices:
        raise TopologyError(
            f"nvidia-smi --query-gpu: lists GPUs {sorted(facts)}, but topo -m lists {indices}; expected the same"
        )
    gpus = tuple(replace(gpu, **facts[gpu.index]) for gpu in bare.gpus)
    speeds = [speeds_by_name(gpu.name or "") or Speeds() for gpu in gpus]
    links = tuple(
        tuple(link(slow.kind, slow.count, (speeds[a], speeds[b]), sockets_gbps) for b, slow in enumerate(row))
        for a, row in enumerate(bare.links)
    )
    return replace(bare, gpus=gpus, links=links)


def _facts(query: str, pids: dict[str, set[int]]) -> dict[int, dict[str, Any]]:
    """Return the fields of each GPU, by index."""
    source = "nvidia-smi --query-gpu"
    facts: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(LOST.sub("", query).splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) != 5 or not re.fullmatch(r"[0-9]{1,4}", cells[0]) or int(cells[0]) in facts:
            _wrong(source, number, f"found {line.strip()[:80]!r}", f"{QUERY}, once for each GPU")
        unknown = {"[N/A]", "N/A", "[Not Supported]"}
        fault = next((cell.strip("[]") for cell in cells if cell.startswith("[") and cell not in unknown), None)
        _, uuid, model, pci, mig = (
            None if cell in unknown or cell.startswith("[") else harmless(cell) for cell in cells
        )
        facts[int(cells[0])] = {
            "uuid": uuid,
            "name": model,
            "pci": normal_pci(pci) if pci else None,
            "unusable": why_unusable(mig=mig == "Enabled", fault=fault, pids=pids.get(uuid or "", ())),
        }
    for index, pci, fault in dict.fromkeys(LOST.findall(query)):
        # Without its index, it is the one that is missing among the others.
        place = int(index) if index else next(i for i in range(len(facts) + 1) if i not in facts)
        facts.setdefault(
            place, {"pci": normal_pci(pci), "unusable": why_unusable(mig=False, fault=harmless(fault.strip()), pids=())}
        )
    return facts


def has_lost_gpu(query: str) -> bool:
    """Return whether the output of --query-gpu has an error instead of facts."""
    return LOST.search(query) is not None or re.search(r"\[(?!N/A|Not Supported)", query) is not None


def _is_lost(facts: dict[str, Any]) -> bool:
    return (facts["unusable"] or "").startswith("unhealthy")


def _with_lost(topology: Topology, indices: list[int]) -> Topology:
    """Return the topology with further GPUs whose links are unknown, and count as the slowest."""
    gpus = sorted((*topology.gpus, *(Gpu(index=index) for index in indices)), key=lambda gpu: gpu.index)
    place = {gpu.index: at for at, gpu in enumerate(topology.gpus)}

    def between(a: int, b: int) -> Link:
        return topology.links[place[a]][place[b]] if {a, b} <= place.keys() else Link(kind="X" if a == b else "SYS")

    def to_gpus(nic: Nic) -> tuple[Link, ...]:
        return tuple(nic.links[place[gpu.index]] if gpu.index in place else Link(kind="SYS") for gpu in gpus)

    return replace(
        topology,
        gpus=tuple(gpus),
        links=tuple(tuple(between(a.index, b.index) for b in gpus) for a in gpus),
        nics=tuple(replace(nic, links=to_gpus(nic)) for nic in topology.nics),
    )


def _pids(apps: str) -> dict[str, set[int]]:
    """Return the compute processes of each GPU, by its UUID."""
    pids: dict[str, set[int]] = {}
    for number, line in enumerate(apps.splitlines(), start=1):
        match = re.fullmatch(r"\s*(\S+)\s*,\s*([0-9]{1,9})\s*", line)
        if match:
            pids.setdefault(match[1], set()).add(int(match[2]))
        elif line.strip():
            _wrong("nvidia-smi --query-compute-apps", number, f"found {line.strip()[:80]!r}", QUERY_APPS)
    return pids


def normal_pci(text: str) -> str:
    """Convert nvidia-smi's `00000000:3B:00.0` to the kernel's `0000:3b:00.0`.

    Raises:
        TopologyError: not such an address.
    """
    match = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower())
    if not match:
        raise TopologyError(f"PCI address {text[:40]!r}: expected one such as 00000000:3B:00.0")
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}"
