"""Pure: NVLinks that GPUs of a host lack compared with their peers."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Literal

from launch.cores import core_list
from launch.machine.nvidia import is_wired, most_nvlinks, speeds_by_name
from launch.machine.topology import IN_MIG_MODE, Topology, has_switch
from launch.placement.findings import Finding, warning

MESH = 8  # GPUs of a DGX-1, whose hybrid cube mesh has pairs with none, one and two NVLinks; each GPU has equally many
REMEDY = (
    "look at `nvidia-smi nvlink --status` and Xid 74 in `dmesg` there, reset the GPUs or seat their bridge again, or "
    "leave them out with --gpus: each all-reduce waits for the slowest link"
)
FABRIC = "start nvidia-fabricmanager there, and see Fabric in `nvidia-smi -q`: all-reduces go over PCIe"


Loss = tuple[tuple[int, ...], int, int]  # one GPU or two, by position; its NVLinks, and the usual number


def nvlink_findings(host: str, topology: Topology, gpus: Literal["all"] | Collection[int]) -> Iterator[Finding]:
    """Yield losses of NVLinks between GPUs of one model, if a GPU that --gpus names has one.

    Other GPUs of the host count as peers, too. A machine that is built with unlike pairs has no loss.
    """
    models: dict[str, list[int]] = {}
    for place, gpu in enumerate(topology.gpus):
        if gpu.unusable != IN_MIG_MODE and not (gpu.unusable or "").startswith("unhealthy"):
            models.setdefault(gpu.name or "", []).append(place)
    switched = has_switch(topology)
    for model, places in models.items():
        counts = [[topology.links[a][b].count for b in places] for a in places]
        losses: dict[tuple[int, int, int], list[list[int]]] = {}
        for lost, count, usual in _losses(counts, model, switched=switched):
            indices = [topology.gpus[places[at]].index for at in lost]
            if gpus == "all" or set(indices) & set(gpus):
                losses.setdefault((len(indices), count, usual), []).append(indices)
        speeds = speeds_by_name(model)
        for (size, count, usual), alike in losses.items():
            which = f"GPU {core_list(index for indices in alike for index in indices)}: "
            if size == 2:
                more = f" and {len(alike) - 1} more pairs" if len(alike) > 1 else ""
                which = f"between GPU {alike[0][0]} and {alike[0][1]}{more}: "
            problem = f"{which}{count} of {usual} NVLinks"
            if speeds and speeds.nvlink_gbps:
                problem += f", {count * speeds.nvlink_gbps:.0f} of {usual * speeds.nvlink_gbps:.0f} GB/s"
            remedy = REMEDY if any(map(any, counts)) else FABRIC
            yield warning(host, "NVLink", problem, remedy)


def _losses(counts: Sequence[Sequence[int]], model: str, *, switched: bool) -> list[Loss]:
    """Return the losses between GPUs of one model, by the number of NVLinks of each pair."""
    places = range(len(counts))
    wired = is_wired(model)
    of_pairs = {(a, b): counts[a][b] for a, b in combinations(places, 2)}
    if not any(of_pairs.values()):
        return [((a,), 0, most_nvlinks(model)) for a in places] if wired and len(places) > 1 else []
    most = [max(row) for row in counts]
    usual, pairs_alike = Counter(of_pairs.values()).most_common(1)[0]
    if switched:
        usual = max(most)
    elif max(sum(map(bool, row)) for row in counts) == 1:  # bridges between two GPUs each
        bare = [a for a in places if not most[a]]
        # An odd one out may have its partner in another container.
        unpaired = [((a,), 0, max(most)) for a in bare if wired or len(bare) > 1]
        return [
            *unpaired,
            *((pair, count, max(most)) for pair, count in of_pairs.items() if 0 < count < max(most)),
        ]
    elif not (usual and len(places) > 3 and pairs_alike > len(of_pairs) / 2):
        sums = [sum(row) for row in counts]
        alone = [a for a in places if not sums[a]]
        whole = len(places) == MESH
        return [((a,), sums[a], max(sums)) for a in places if sums[a] < max(sums) and (whole or a in alone)]
    low = [((a,), most[a], usual) for a in places if most[a] < usual]
    limits = {(a, b): min(most[a], most[b], usual) for a, b in of_pairs}
    return [*low, *((pair, count, limits[pair]) for pair, count in of_pairs.items() if count < limits[pair])]
