"""Output of nvidia-smi -> a topology: `topo -m`, `topo -p2p`, `--query-gpu` and `--query-compute-apps`."""

import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NoReturn

from launch.cores import parse_cores
from launch.errors import TopologyError, harmless
from launch.machine.nvidia import P2P_WORDS, NcclSpeeds, speeds_by_name
from launch.machine.topology import PCIE_KINDS, Gpu, Link, Nic, PeerAccess, Topology, link_between, why_unusable

QUERY = "index,uuid,name,pci.bus_id,mig.mode.current"
QUERY_APPS = "gpu_uuid,pid"
SOURCE = "nvidia-smi"

# nvidia-smi underlines its header; text copied from a browser has often lost only the escape character.
_ESCAPES = re.compile(r"\x1b?\[[0-9;]*m")
_AFFINITY = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
_GPU = re.compile(r"GPU([0-9]{1,4})")
_LEGENDS = ("Legend:", "NIC Legend:")
# A GPU that has fallen off its bus: "... for GPU0000:41:00.0: GPU is lost. ...", "... for GPU1: 0000:C1:00.0: Unknown"
LOST = re.compile(r"Unable to determine the device handle for gpu ?(?:(\d+): )?([\da-f:.]+): (.+)", re.IGNORECASE)
WARNING = re.compile(r"^WARNING: .*$", re.MULTILINE)  # of a corrupt infoROM, for example
_PROMPT = re.compile(r"```|.*\S@\S|.*[$#>] *nvidia-smi|(?!NV#|\s)[^=]*[$#>](\s|$)")  # what is copied with an output
_CUT_OFF = re.compile(r"\d+(,\d+){5}")  # a list of cores that is longer: nvidia-smi prints six entries
_TAB = 8


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int  # of the line, from 1
    words: dict[str, str]  # by the device of the column
    affinity: dict[str, str]  # CPU Affinity, NUMA Affinity, GPU NUMA ID: those present in the row


def parse(text: str, *, name: str, gpu_name: str | None = None) -> Topology | PeerAccess:
    """Parse the output of `nvidia-smi topo -m` or `nvidia-smi topo -p2p`; NIC rows and legends may be cut off.

    `name` is the file's, for messages and `Topology.source`, `gpu_name` the model, without which speeds are unknown.
    TopologyError, with file, line and the expected text, for any text that is not understood.
    """
    every = enumerate(WARNING.sub("", text.removeprefix("\ufeff")).split("\n"), start=1)
    lines = [(number, _ESCAPES.sub("", line).expandtabs(_TAB).rstrip()) for number, line in every]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise TopologyError(f"{name}: empty; expected what `nvidia-smi topo -m` prints")
    lines = lines[next((i for i, (_, line) in enumerate(lines) if _is_header(line)), 0) :]
    lines = list(takewhile(lambda numbered: not _PROMPT.match(numbered[1]), lines))
    end = next((i for i, (_, line) in enumerate(lines) if line.strip() in _LEGENDS), len(lines))
    devices, titles = _header(name, *lines[0], labels=[line.split()[0] for _, line in lines[1:end]])
    rows: dict[str, _Row] = {}
    for number, line in lines[1:end]:
        label = line.split()[0]
        if label not in devices or label in rows:
            _wrong(name, number, f"found {label[:40]!r}", "one row for each of the header's devices, or 'Legend:'")
        rows[label] = _row(name, number, line, devices, titles)
    words, nic_names = _legends(name, lines[end:])
    gpus = sorted(filter(_GPU.fullmatch, devices), key=lambda gpu: int(gpu[3:]))
    nics = [device for device in devices if device not in gpus]
    missing = [device for device in devices if device not in rows]
    if missing and set(missing) != set(nics):
        _wrong(name, lines[end - 1][0], f"the table ends without a row of {missing[0]}", "a row for each GPU and NIC")
    if "OK" in words or any(word in P2P_WORDS for row in rows.values() for word in row.words.values()):
        return _peer_access(name, gpus, rows)
    if nic_names and set(nic_names) != set(nics):
        odd = min(set(nic_names) ^ set(nics))
        raise TopologyError(f"{name}: {odd} is in the header or in the NIC legend alone; expected it in both")
    links = _links(name, rows)
    ends = [speeds_by_name(gpu_name) or NcclSpeeds()] * 2
    return Topology(
        source=name,
        gpus=tuple(_gpu(name, gpu, rows[gpu], gpu_name) for gpu in gpus),
        links=tuple(tuple(link_between(*links[a, b], ends, None) for b in gpus) for a in gpus),
        nics=tuple(
            Nic(name=nic_names.get(nic, nic), links=tuple(Link(kind=links[gpu, nic][0]) for gpu in gpus))
            for nic in nics
        ),
    )


def _is_header(line: str) -> bool:
    return not _PROMPT.match(line) and any(map(_GPU.match, line.split())) and "X" not in line.split()


def _wrong(name: str, number: int, problem: str, expected: str) -> NoReturn:
    raise TopologyError(f"{name}:{number}: {problem}; expected {expected}")


def _header(name: str, number: int, line: str, *, labels: list[str]) -> tuple[list[str], list[str]]:
    """Return the devices of the columns, and the titles of the columns after them."""
    matches = list(_AFFINITY.finditer(line))
    start = matches[0].start() if matches else len(line)
    # nvidia-smi may leave out the space between two names.
    spaced = re.sub(r"(?<=\d)(?=(?:GPU|NIC)\d)", " ", line[:start])
    devices, titles = spaced.split(), [" ".join(match[0].split()) for match in matches]
    if "".join(devices) == "".join(labels):
        devices = labels  # old drivers, and terminals, omit the space between the header's names
    if not any(map(_GPU.fullmatch, devices)) or _AFFINITY.sub("", line[start:]).strip():
        expected = "the header of `nvidia-smi topo -m`: GPU0 GPU1 ..., NICs, CPU Affinity, NUMA Affinity, GPU NUMA ID"
        _wrong(name, number, f"found {line.strip()[:60]!r}", expected)
    for device in devices:
        if not _GPU.fullmatch(device) and not re.fullmatch(r"(?!GPU)[A-Za-z][A-Za-z0-9_.-]*", device):
            _wrong(name, number, f"column {device[:40]!r}", "GPU<n> or the name of a NIC such as mlx5_0 or NIC0")
    columns = [f"GPU{int(match[1])}" if (match := _GPU.fullmatch(device)) else device for device in devices] + titles
    if twice := [column for column in columns if columns.count(column) > 1]:
        _wrong(name, number, f"{twice[0]} appears twice", "each column once")
    return devices, titles


def _row(name: str, number: int, line: str, devices: list[str], titles: list[str]) -> _Row:
    label, *cells = list(re.finditer(r"\S+", line))
    width = len(devices)
    tail = cells[width:]
    most = len(titles) if _GPU.fullmatch(label[0]) else 0
    if len(cells) < width or len(tail) > most:
        expected = f"{width}, one for each GPU and NIC of the header" + (f", and up to {most} of affinity" * bool(most))
        _wrong(name, number, f"{label[0]} has {len(cells)} cells", expected)
    # Cells may be missing at the end, if nvidia-smi does not know them. In a container without a core near the GPU the
    # first one is empty, which leaves a tab or more before the next; if another one is also missing, the row is
    # ambiguous. An empty cell in the middle leaves more than the two tabs before the last.
    if tail and len(tail) < most and tail[0].start() - cells[width - 1].end() >= _TAB:
        titles = titles[1:] if len(tail) == most - 1 else []
    elif len(tail) == most - 1 == 2 and tail[1].start() - tail[0].end() > 2 * _TAB:
        titles = titles[::2]
    affinity = {title: cell[0] for title, cell in zip(titles, tail, strict=False)}
    words = {device: cell[0] for device, cell in zip(devices, cells, strict=False)}
    return _Row(number=number, words=words, affinity=affinity)


def _legends(name: str, lines: list[tuple[int, str]]) -> tuple[set[str], dict[str, str]]:
    """Return the link types that the legend explains, and the NICs' real names."""
    words: set[str] = set()
    nics: dict[str, str] = {}
    title = ""
    for number, line in lines:
        if line.strip() in _LEGENDS:
            title = line.strip()
        elif title == "Legend:" and (match := re.fullmatch(r"\s*([A-Z]+#?)\s+=\s+\S.*", line)):
            words.add(match[1])
        elif title == "NIC Legend:" and (match := re.fullmatch(r"\s*([A-Za-z0-9_.-]+):\s+([A-Za-z0-9_.-]+)", line)):
            if match[1] in nics or match[2] in nics.values():
                _wrong(name, number, f"{line.strip()!r} is there already", "each NIC once")
            nics[match[1]] = match[2]
        elif title == "NIC Legend:":  # in the other one it is the rest of a line that a terminal has wrapped
            _wrong(name, number, f"found {line.strip()[:60]!r}", "'NIC0: name' in the NIC legend")
    return words, nics


def _peer_access(name: str, gpus: list[str], rows: dict[str, _Row]) -> PeerAccess:
    for a in gpus:
        for b, word in rows[a].words.items():
            if (word == "X") != (a == b) or (word != "X" and word not in P2P_WORDS):
                _wrong(name, rows[a].number, f"{a}-{b} says {word[:40]!r}", f"{', '.join(P2P_WORDS)}; X for itself")
    words = tuple(tuple(rows[a].words[b] for b in gpus) for a in gpus)
    return PeerAccess(source=name, gpus=tuple(int(gpu[3:]) for gpu in gpus), words=words)


def _links(name: str, rows: dict[str, _Row]) -> dict[tuple[str, str], tuple[str, int]]:
    """Return the kind and number of links of each two devices, of which the first has a row."""
    links: dict[tuple[str, str], tuple[str, int]] = {}
    for a, row in rows.items():
        for b, word in row.words.items():
            match = re.fullmatch(r"NV([1-9][0-9]{0,2})", word)
            if a != b and match and _GPU.fullmatch(a) and _GPU.fullmatch(b):
                links[a, b] = ("NV", int(match[1]))
            elif (word == "X" and a == b) or (word in (*PCIE_KINDS, "SOC") and a != b):
                links[a, b] = ("SYS" if word == "SOC" else word, 0)  # SOC: its name in drivers before 2017
            else:
                expected = "X, NV1, NV2, ..., PIX, PXB, PHB, NODE, SYS; X for a device and itself"
                _wrong(name, row.number, f"{a}-{b} says {word[:40]!r}", expected)
            if links.get((b, a), links[a, b]) != links[a, b]:
                before = rows[b].words[a]
                _wrong(name, row.number, f"{a}-{b} says {word}, {b}-{a} says {before}", "the same both ways")
    return links


def _gpu(name: str, device: str, row: _Row, gpu_name: str | None) -> Gpu:
    def numbers(title: str) -> tuple[int, ...]:
        text = row.affinity.get(title, "N/A")
        try:
            return () if text == "N/A" or _CUT_OFF.fullmatch(text) else parse_cores(text)
        except TopologyError as error:
            raise TopologyError(f"{name}:{row.number}: {title} of {device}: {error}") from None

    numbers("GPU NUMA ID")  # the GPU's memory as a NUMA node: not usable for binding, but it must be a number
    return Gpu(index=int(device[3:]), cores=numbers("CPU Affinity"), numa=numbers("NUMA Affinity"), name=gpu_name)


def from_nvidia_smi(
    matrix: str | None, query: str | None = None, apps: str | None = None, *, sockets_gbps: float | None = None
) -> Topology:
    """Return this machine's topology from three outputs of nvidia-smi, and the GB/s between the CPU sockets, if known.

    `matrix` is that of `topo -m`; None if it fails, as for a lost GPU: the links count as the slowest. `query` is that
    of --query-gpu=QUERY, without which UUIDs and names stay None, `apps` that of --query-compute-apps=QUERY_APPS, both
    as csv,noheader. TopologyError if an output is not understood, or if they describe different GPUs.
    """
    table: Topology | PeerAccess = Topology(source=SOURCE)
    if matrix is not None:
        table = parse(LOST.sub("", matrix), name="nvidia-smi topo -m")
    if isinstance(table, PeerAccess):
        raise TopologyError(f"{table.source}: printed what topo -p2p prints; expected the table of topo -m")
    table = replace(table, source=SOURCE)
    if query is None:
        return table
    facts = _facts(WARNING.sub("", query), _pids(WARNING.sub("", LOST.sub("", apps or ""))))
    place = {gpu.index: at for at, gpu in enumerate(table.gpus)}
    lost = {index for index, own in facts.items() if (own["unusable"] or "").startswith("unhealthy")}
    if place.keys() - facts or (matrix is not None and facts.keys() - place - lost):
        raise TopologyError(
            f"nvidia-smi --query-gpu: lists GPUs {sorted(facts)}, but topo -m lists {sorted(place)}; expected the same"
        )
    gpus = [
        replace(table.gpus[place[index]] if index in place else Gpu(index=index), **facts[index])
        for index in sorted(facts)
    ]
    speeds = {gpu.index: speeds_by_name(gpu.name) or NcclSpeeds() for gpu in gpus}

    def between(a: int, b: int) -> Link:
        known = table.links[place[a]][place[b]] if a in place and b in place else Link(kind="X" if a == b else "SYS")
        return link_between(known.kind, known.count, (speeds[a], speeds[b]), sockets_gbps)

    def near(nic: Nic) -> tuple[Link, ...]:
        return tuple(nic.links[place[gpu.index]] if gpu.index in place else Link(kind="SYS") for gpu in gpus)

    return replace(
        table,
        gpus=tuple(gpus),
        links=tuple(tuple(between(a.index, b.index) for b in gpus) for a in gpus),
        nics=tuple(replace(nic, links=near(nic)) for nic in table.nics),
    )


def _facts(query: str, pids: dict[str, set[int]]) -> dict[int, dict[str, Any]]:
    """Return the fields of each GPU, by index."""
    facts: dict[int, dict[str, Any]] = {}
    unknown = {"[N/A]", "N/A", "[Not Supported]"}
    for number, line in enumerate(LOST.sub("", query).splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        if len(cells) != 5 or not re.fullmatch(r"[0-9]{1,4}", cells[0]) or int(cells[0]) in facts:
            _wrong("nvidia-smi --query-gpu", number, f"found {line.strip()[:80]!r}", f"{QUERY}, once for each GPU")
        fault = next((cell.strip("[]") for cell in cells if cell.startswith("[") and cell not in unknown), None)
        known = [None if cell in unknown or cell.startswith("[") else harmless(cell) for cell in cells]
        _, uuid, model, pci, mig = known
        facts[int(cells[0])] = {
            "uuid": uuid,
            "name": model,
            "pci": pci and normal_pci(pci),
            "unusable": why_unusable(mig=mig == "Enabled", fault=fault, pids=pids.get(uuid or "", ())),
        }
    for index, pci, fault in dict.fromkeys(LOST.findall(query)):
        # Without its index, it is the one that is missing among the others.
        place = int(index) if index else next(i for i in range(len(facts) + 1) if i not in facts)
        why = why_unusable(mig=False, fault=harmless(fault.strip()), pids=())
        facts.setdefault(place, {"pci": normal_pci(pci), "unusable": why})
    return facts


def normal_pci(text: str) -> str:
    """Convert nvidia-smi's `00000000:3B:00.0` to the kernel's `0000:3b:00.0`; TopologyError for anything else."""
    match = re.fullmatch(r"([0-9a-f]{1,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.strip().lower())
    if not match:
        raise TopologyError(f"PCI address {text[:40]!r}: expected one such as 00000000:3B:00.0")
    return f"{int(match[1], 16):04x}{match[2]}"


def _pids(apps: str) -> dict[str, set[int]]:
    """Return the compute processes of each GPU, by its UUID."""
    pids: dict[str, set[int]] = {}
    for number, line in enumerate(apps.splitlines(), start=1):
        match = re.fullmatch(r"\s*(\S+)\s*,\s*(?:([0-9]{1,9})|\[.*\])\s*", line)
        if match:
            pids.setdefault(match[1], set()).add(int(match[2] or 0))
        elif line.strip() and not re.fullmatch(r"\[.*\]", line.strip()):  # [Not Supported]
            _wrong("nvidia-smi --query-compute-apps", number, f"found {line.strip()[:80]!r}", QUERY_APPS)
    return pids
