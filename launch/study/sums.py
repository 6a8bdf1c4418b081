"""All-reduce algorithms, measured in turn: each is a separate job, since MPI and NCCL read their variables at start.

Every second round runs in reverse order. After the first round, algorithms far behind the fastest are dropped.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

from launch.hosts.host import Host
from launch.output import say
from launch.placement.allreduce import TWO_LEVEL, USUAL, ComparedSums, TimedWay, ways

ROUNDS = 3
BEHIND = 1.2  # times the fastest median: slower algorithms are not measured again

# (name, variables, arguments for hvdtrain.bandwidth) -> the seconds of each sum; None if it failed.
Measure = Callable[[str, Mapping[str, str], Sequence[str]], tuple[float, ...] | None]


def compare(hosts: Sequence[Host], size: int, measure: Measure, *, on_gpus: bool) -> ComparedSums | None:
    """Compare sums of `size` bytes over all ranks of these hosts; None if the default cannot be measured."""
    known = ways(on_gpus=on_gpus, hosts=len(hosts))
    if len({host.slots for host in hosts}) > 1:  # it needs equally many ranks on each host
        known.pop(TWO_LEVEL, None)
    rounds_s: dict[str, list[tuple[float, ...]]] = {name: [] for name in known}
    running = list(known)
    for number in range(ROUNDS):
        for name in running if number % 2 == 0 else reversed(running):
            say(f"sums by {name} (round {number + 1} of {ROUNDS})")
            times_s = measure(name, known[name], ["--over", "two-level" if name == TWO_LEVEL else "ours"])
            if times_s is not None:
                rounds_s[name].append(times_s)
        if len(rounds_s[USUAL]) <= number:
            return None
        running = [name for name in running if len(rounds_s[name]) > number]
        medians = {name: statistics.median(rounds_s[name][0]) for name in running}
        running = [name for name in running if name == USUAL or medians[name] <= BEHIND * min(medians.values())]
    return ComparedSums(
        hosts=tuple(host.name for host in hosts),
        ranks=tuple(host.slots for host in hosts),
        on_gpus=on_gpus,
        bytes=size,
        ways=tuple(TimedWay(name=name, rounds_s=tuple(own)) for name, own in rounds_s.items() if own),
    )
