"""A discrete-event simulation of failures, saves and restarts, compared with the formulas of `hvdlaunch estimate`.

A job works, is held by periodic checkpoints, and loses ranks as a Poisson process. Then it returns to the last
checkpoint and stops for a restart, which may also fail. Steps wait for the slowest rank, whose time is random. Pure
Python, fixed seeds.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass

from bench.pairs import Case, Table
from launch.advice.estimate.failures import daly_s, goodput_restarts, odds
from launch.advice.estimate.step import STRAGGLERS, late


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A simulated job."""

    work_s: float  # required without failures
    every_s: float  # between checkpoints, of work
    save_s: float
    restart_s: float
    between_s: float  # mean time between failures of all ranks
    is_killed: bool = False  # between_s after all ranks train again, as bench/cases/kills.py kills; else at random

    def failure_s(self, draws: random.Random) -> float:
        """From one failure to the next, or from the time that all ranks train."""
        return self.between_s if self.is_killed else draws.expovariate(1 / self.between_s)


def wall_s(job: SimulatedJob, draws: random.Random) -> float:
    """Return the time of one job."""
    clock_s = kept_s = 0.0
    fails_at_s = job.failure_s(draws)
    while kept_s < job.work_s - 1e-6:
        stretch_s = min(job.every_s, job.work_s - kept_s)
        while clock_s + stretch_s + job.save_s > fails_at_s:
            clock_s, fails_at_s = _restart(job, fails_at_s, fails_at_s + job.failure_s(draws), draws)
        clock_s += stretch_s + job.save_s
        kept_s += stretch_s
    return clock_s


def _restart(job: SimulatedJob, clock_s: float, fails_at_s: float, draws: random.Random) -> tuple[float, float]:
    """Restart until that succeeds; return the clock and the next failure."""
    if job.is_killed:
        return clock_s + job.restart_s, fails_at_s + job.restart_s
    while fails_at_s < clock_s + job.restart_s:
        clock_s, fails_at_s = fails_at_s, fails_at_s + job.failure_s(draws)
    return clock_s + job.restart_s, fails_at_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A formula compared with many simulated jobs."""

    what: str
    ranks: int
    formula: float
    simulated: float
    error: float  # standard error of the mean
    jobs: int

    @property
    def agrees(self) -> bool:
        return abs(self.formula - self.simulated) <= 3 * self.error


def goodputs(
    ranks: int, *, jobs: int, seed: int, rate_per_hour: float, save_s: float, restart_s: float
) -> list[Comparison]:
    """Compare the goodput with Daly's interval, and the odds of an interruption."""
    between_s = 3600 / (rate_per_hour * ranks)
    every_s = daly_s(save_s, between_s)
    job = SimulatedJob(work_s=40 * every_s, every_s=every_s, save_s=save_s, restart_s=restart_s, between_s=between_s)
    draws = random.Random(seed)  # noqa: S311 (a simulation)
    walls_s = [wall_s(job, draws) for _ in range(jobs)]
    mean_s = statistics.fmean(walls_s)
    spread = statistics.stdev(walls_s) / mean_s / math.sqrt(jobs)
    shares = [job.work_s / seconds for seconds in walls_s]
    restarts = Comparison(
        what="restarts",
        ranks=ranks,
        formula=goodput_restarts(every_s, save_s=save_s, restart_s=restart_s, between_s=between_s),
        simulated=job.work_s / mean_s,
        error=spread * statistics.fmean(shares),
        jobs=jobs,
    )
    draws = random.Random(seed + 1)  # noqa: S311 (a simulation)
    hours = 24.0
    hit = statistics.fmean(any(draws.expovariate(rate_per_hour) < hours for _ in range(ranks)) for _ in range(jobs))
    interrupted = Comparison(
        what=f"odds in {hours:g} h",
        ranks=ranks,
        formula=odds(hours, ranks, rate_per_hour),
        simulated=hit,
        error=math.sqrt(max(hit * (1 - hit), 1 / jobs) / jobs),
        jobs=jobs,
    )
    return [restarts, interrupted]


def stragglers(ranks: int, *, jobs: int, seed: int, base: int = 8) -> Comparison:
    """Compare the delay of the slowest of N normal deviations, relative to the slowest of 8, with the model's."""
    draws = random.Random(seed)  # noqa: S311 (a simulation)

    def slowest(count: int) -> list[float]:
        return [max(draws.gauss(0, STRAGGLERS) for _ in range(count)) for _ in range(jobs)]

    of_ranks, of_base = slowest(ranks), slowest(base)
    return Comparison(
        what=f"slowest rank, later than of {base}",
        ranks=ranks,
        formula=STRAGGLERS * (late(ranks) - late(base)),
        simulated=statistics.fmean(of_ranks) - statistics.fmean(of_base),
        error=math.hypot(statistics.stdev(of_ranks), statistics.stdev(of_base)) / math.sqrt(jobs),
        jobs=jobs,
    )


# efficientnet_tiny, 2 ranks with a core each: python bench/run.py goodput --np 2
KILLS = 15
TRAINED_S = 15.0  # by all ranks from one kill to the next
RESTART_S = 6.04  # until all ranks trained again: 5.85 to 6.35
EVERY_S = 1.13  # ten steps, between checkpoints
MEASURED = 0.75  # goodput, against a run that saves as often


def predicted(*, kills: int = 1000) -> tuple[float, float]:
    """Goodput by the formula, whose failures strike at random, and by the simulation, whose kills do as those."""
    formula = goodput_restarts(EVERY_S, save_s=0.0, restart_s=RESTART_S, between_s=TRAINED_S + RESTART_S)
    job = SimulatedJob(
        work_s=kills * TRAINED_S,
        every_s=EVERY_S,
        save_s=0.0,
        restart_s=RESTART_S,
        between_s=TRAINED_S,
        is_killed=True,
    )
    return formula, job.work_s / wall_s(job, random.Random(0))  # noqa: S311 (a simulation)


def simulate(chosen: argparse.Namespace) -> Table:
    """Simulated failures, saves and restarts of 8 to 1,024 ranks compared with the formulas of `hvdlaunch estimate`.

    Status 1 if one is off by more than three standard errors. The last row is a real run whose ranks were killed.
    """
    table = Table(
        name="simulate",
        question=f"Formulas of hvdlaunch estimate against {chosen.jobs} simulated jobs each:",
        columns=["what", "ranks", "formula", "simulated", "standard error", "within 3", "measured"],
        conditions={"measured": f"{KILLS} kills, {RESTART_S} s until all ranks trained again"},
    )
    for ranks in (8, 64, 256, 1024):
        compared = goodputs(ranks, jobs=chosen.jobs, seed=ranks, rate_per_hour=1.2e-4, save_s=20.0, restart_s=300.0)
        for one in [*compared, stragglers(ranks, jobs=chosen.jobs, seed=ranks)]:
            numbers = (f"{value:.4f}" for value in (one.formula, one.simulated, one.error))
            table.add(one.what, one.ranks, *numbers, "yes" if one.agrees else "no", None)
            table.holds = table.holds and one.agrees
    formula, simulated = (f"{share:.2f}" for share in predicted())
    table.add("kills", 2, formula, simulated, None, None, f"{MEASURED:.2f}")
    return table


CASES = {"simulate": Case(measure=simulate, options={"jobs": 1000})}
