"""All-reduce algorithms: the variables that select each, measurements by `check --bandwidth`, and the winner.

On CPUs MPI sums: Open MPI's `coll_tuned` has several algorithms, and `coll_han` sums in two levels. From Open MPI 5 on,
han takes precedence on several hosts, so it must be disabled to use an algorithm of tuned. On GPUs NCCL sums. `--sync
two-level` is an option of the program, which no variable can set.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from launch.machine.show.table import aligned

GAIN = 1.03  # a smaller gain is ignored
USUAL = "the default"  # of MPI or NCCL: the baseline of the comparison
TWO_LEVEL = "--sync two-level"
_TUNED = "OMPI_MCA_coll_tuned_allreduce_algorithm"
_HAN = "OMPI_MCA_coll_han_priority"
_ALGORITHMS = {  # ompi/mca/coll/tuned/coll_tuned_allreduce_decision.c
    "tree (reduce, broadcast)": 2,
    "recursive doubling": 3,
    "ring": 4,
    "ring in segments": 5,
    "halving (Rabenseifner)": 6,
}
ON_CPUS: Mapping[str, Mapping[str, str]] = {USUAL: {}} | {
    name: {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", _TUNED: str(number), _HAN: "0"}
    for name, number in _ALGORITHMS.items()
}
OVER_HOSTS: Mapping[str, Mapping[str, str]] = {"two-level, MPI's": {_HAN: "100"}, TWO_LEVEL: {}}
ON_GPUS: Mapping[str, Mapping[str, str]] = {USUAL: {}, "ring": {"NCCL_ALGO": "Ring"}, "tree": {"NCCL_ALGO": "Tree"}}


def ways(*, on_gpus: bool, hosts: int) -> dict[str, Mapping[str, str]]:
    """Return the variables of each available algorithm, by its name."""
    if on_gpus:
        return {**ON_GPUS, **({TWO_LEVEL: {}} if hosts > 1 else {})}
    return {**ON_CPUS, **(OVER_HOSTS if hosts > 1 else {})}


@dataclass(frozen=True, kw_only=True)
class TimedWay:
    """The measured times of one algorithm."""

    name: str
    rounds_s: tuple[tuple[float, ...], ...]  # the sums of each job in order; a slow algorithm has one job

    @property
    def times_s(self) -> tuple[float, ...]:
        """The times of all jobs."""
        return tuple(seconds for own in self.rounds_s for seconds in own)


@dataclass(frozen=True, kw_only=True)
class ComparedSums:
    """Sums of one size over all ranks of several hosts, with several algorithms in turn."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]  # of each host
    on_gpus: bool
    bytes: int
    ways: tuple[TimedWay, ...]  # USUAL first

    @property
    def settings(self) -> dict[str, Mapping[str, str]]:
        """Return the variables of each algorithm."""
        return ways(on_gpus=self.on_gpus, hosts=len(self.hosts))


def gains(sums: ComparedSums) -> dict[str, tuple[float, ...]]:
    """Return each algorithm's speedup over the default in each round, from medians, by its name."""
    usual, *others = sums.ways
    return {
        way.name: tuple(
            statistics.median(before) / statistics.median(after)
            for before, after in zip(usual.rounds_s, way.rounds_s, strict=False)
        )
        for way in others
    }


def winner(sums: ComparedSums) -> str | None:
    """Return the algorithm with the best median, if any was GAIN times as fast as the default in every round."""
    rounds = len(sums.ways[0].rounds_s)
    faster = {name for name, own in gains(sums).items() if len(own) == rounds and min(own) >= GAIN}
    medians = {way.name: statistics.median(way.times_s) for way in sums.ways if way.name in faster}
    return min(medians, key=medians.__getitem__, default=None)


def table(sums: ComparedSums) -> str:
    """Return a table of the times relative to the default, the winner, and how to select it."""
    where = ", ".join(f"{host}:{ranks}" for host, ranks in zip(sums.hosts, sums.ranks, strict=True))
    rows = [[f"sum of {sums.bytes / 1e6:.4g} MB over {where}", "median ms", "half of them", "n", "times as fast"]]
    known = gains(sums)
    for way in sums.ways:
        low, median, high = (1e3 * seconds for seconds in statistics.quantiles(way.times_s, n=4, method="inclusive"))
        ratios = ", ".join(f"{ratio:.2f}" for ratio in known.get(way.name, ())) or "1"
        rows.append([way.name, f"{median:.3g}", f"{low:.3g} to {high:.3g}", str(len(way.times_s)), ratios])
    return f"{aligned(rows)}\n{verdict(sums)}"


def verdict(sums: ComparedSums) -> str:
    """Return the winner, its gain, and what to do to use it."""
    name = winner(sums)
    if name is None:
        return f"no way of summing was {GAIN - 1:.0%} faster than {USUAL} in every round: none is set"
    ratios = gains(sums)[name]
    by = f"{statistics.median(ratios):.2f} times as fast as {USUAL} ({min(ratios):.2f} to {max(ratios):.2f})"
    settings = " ".join(f"{variable}={value}" for variable, value in sums.settings[name].items())
    remedy = f"--measured FILE sets {settings}" if settings else f"pass {name} to the program"
    return f"sums of {sums.bytes / 1e6:.4g} MB go fastest by {name}, {by}: {remedy}"


def chosen(
    sums: ComparedSums, ranks: Mapping[str, int], environment: Mapping[str, str], *, on_gpus: bool
) -> tuple[Mapping[str, str], str]:
    """Return the variables of the fastest algorithm for a run with these `ranks` by host, and a line about it.

    Return None for a run with other ranks, or if the user's environment sets one of the variables.
    """
    measured = dict(zip(sums.hosts, sums.ranks, strict=True))
    if measured != dict(ranks) or sums.on_gpus != on_gpus:
        where = ", ".join(f"{host}:{count}" for host, count in measured.items())
        return {}, f"note: --measured: ways of summing were compared over {where}, not over these ranks: none is set"
    name = winner(sums)
    settings = {} if name is None else sums.settings[name]
    if mine := [variable for variable in settings if variable in environment]:
        return {}, f"note: --measured: {', '.join(mine)} of your environment stays; {verdict(sums)}"
    return settings, f"note: --measured: {verdict(sums)}"
