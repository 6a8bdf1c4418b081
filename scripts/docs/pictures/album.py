"""The pictures of the docs, by the names of their files."""

from collections.abc import Callable, Mapping

from scripts.docs.pictures import architecture, choice, life, overlap, recording, replicas, rings, sums

PICTURES: Mapping[str, Callable[[], str]] = {
    "architecture": architecture.draw,
    "run_life": life.draw,
    "ring_choice": rings.draw,
    "replicas": replicas.draw,
    "sync": sums.draw,
    "overlap": overlap.draw,
    "which_option": choice.draw,
    "quick_start": recording.draw,
}
