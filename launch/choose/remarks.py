"""Pure: what the user should know of the GPUs that a run has got."""

from collections.abc import Iterable, Mapping, Sequence

from launch.choose.placement import RankSlot
from launch.errors import harmless
from launch.machine.topology import Topology

MAX_NAMED = 4


def gpu_remarks(slots: Sequence[RankSlot], topologies: Mapping[str, Topology]) -> tuple[str, ...]:
    """One line each for GPUs that are in use already, unlike models, and each drawback of some GPUs."""
    gpus = {(host, gpu.index): gpu for host, topology in topologies.items() for gpu in topology.gpus}
    chosen = [(slot, gpus[slot.host, slot.gpu]) for slot in slots if slot.gpu is not None]
    shared = _places(
        (f"{gpu.shared or gpu.unusable}, used because --gpus names it", slot) for slot, gpu in chosen if slot.shared
    )
    drawbacks = _places((drawback, slot) for slot, gpu in chosen for drawback in gpu.drawbacks)
    lines = [f"{places}: {what}" for what, places in (shared | drawbacks).items()]
    models = _places((harmless(gpu.name), slot) for slot, gpu in chosen if gpu.name is not None)
    if len(models) > 1:
        unlike = "; ".join(f"{name} ({places})" for name, places in models.items())
        lines.append(f"unlike GPUs, and each step waits for the slowest: {unlike}")
    return tuple(lines)


def _places(facts: Iterable[tuple[str, RankSlot]]) -> dict[str, str]:
    """Each fact with the GPUs that it is about."""
    found: dict[str, list[str]] = {}
    for fact, slot in facts:
        found.setdefault(fact, []).append(f"GPU {slot.gpu} of {slot.host}")
    return {fact: _listed(places) for fact, places in found.items()}


def _listed(places: Sequence[str]) -> str:
    more = f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else ""
    return ", ".join(places[:MAX_NAMED]) + more
