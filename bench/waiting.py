"""Waiting without stealing: what ranks that fill their cores lose by how they wait, alone and beside another job.

    python bench/waiting.py --rounds 5            on an idle machine
    python bench/waiting.py --rounds 5 --busy     beside one process that only computes, started and ended here

Every round starts each variant once, in turns; a ratio is the time of a step against `as it is` in the same round:
below 1 is faster. What may be changed: Open MPI spins or yields, the thread that waits for a sum looks for it all the
time (as Horovod's own does) or sleeps in between, Horovod's rounds are rarer, the sums go over Gloo, which sleeps in
the kernel.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from variants import Variant, arguments, compare

FIRST = "as it is"
# Both: with MPI's controller and Gloo's sums Horovod 0.28.1 dies of a segmentation fault.
GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}

VARIANTS: dict[str, Variant] = {
    FIRST: ([], {}),
    "Open MPI spins": (["--spin"], {}),
    "looks all the time": (["--look-every-us=0"], {}),
    "looks every 50 us": (["--look-every-us=50"], {}),
    "looks every 1000 us": (["--look-every-us=1000"], {}),
    "cycle 5 ms": (["--set=cycle_time_ms=5"], {}),
    "Horovod's reducer": (["--set=reducer=horovod"], {}),
    "Gloo": ([], GLOO),
}


@contextlib.contextmanager
def one_busy_process() -> Iterator[None]:
    """A neighbour that takes one core's time, as long as this process lives."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]
    )
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def main() -> None:
    words = arguments(__doc__ or "")
    words.add_argument("--busy", action="store_true", help="beside a process that only computes")
    chosen = words.parse_args()
    beside = "one busy process" if chosen.busy else "nothing else"
    compare(
        VARIANTS,
        chosen,
        name="waiting_busy" if chosen.busy else "waiting",
        question=f"How should {chosen.ranks} ranks wait for each other, beside {beside}?",
        neighbour=beside,
        beside=one_busy_process() if chosen.busy else None,
    )


if __name__ == "__main__":
    main()
