"""A discrete-event simulation of failures, saves and restarts, compared with the formulas of `hvdlaunch estimate`.

A job works, is held by periodic checkpoints, and loses ranks as a Poisson process. With restarts it returns to the last
checkpoint and stops for a restart, which may also fail; in place it stops for a recovery. Steps wait for the slowest
rank, whose time is random. Pure Python, fixed seeds.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass

from bench.pairs import Case, Table
from launch.estimate.failures import daly_s, goodput_in_place, goodput_restarts, odds
from launch.estimate.step import STRAGGLERS, late


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A simulated job."""

    work_s: float  # required without failures
    every_s: float  # between checkpoints, of work
    save_s: float
    stop_s: float  # of a restart, or of a recovery in place
    between_s: float  # mean time between failures of all ranks
    in_place: bool


def wall_s(job: SimulatedJob, draws: random.Random) -> tuple[float, int]:
    """Return the time of one job, and the number of its interruptions."""
    clock_s = kept_s = 0.0
    failures = 0
    fails_at_s = draws.expovariate(1 / job.between_s)
    while kept_s < job.work_s - 1e-6:
        stretch_s = min(job.every_s, job.work_s - kept_s)
        left_s = stretch_s + job.save_s
        while left_s > 0:
            if clock_s + left_s <= fails_at_s:
                clock_s, left_s = clock_s + left_s, 0.0
                continue
            failures += 1
            left_s = left_s - (fails_at_s - clock_s) if job.in_place else left_s
            clock_s, fails_at_s = fails_at_s, fails_at_s + draws.expovariate(1 / job.between_s)
            clock_s, fails_at_s, again = _stand_still(job, clock_s, fails_at_s, draws)
            failures += again
            if not job.in_place:
                left_s = stretch_s + job.save_s
        kept_s += stretch_s
    return clock_s, failures


def _stand_still(
    job: SimulatedJob, clock_s: float, fails_at_s: float, draws: random.Random
) -> tuple[float, float, int]:
    """Restart or recover until that succeeds; return the clock, the next failure, and the failures meanwhile."""
    again = 0
    while fails_at_s < clock_s + job.stop_s:
        again += 1
        clock_s, fails_at_s = fails_at_s, fails_at_s + draws.expovariate(1 / job.between_s)
    return clock_s + job.stop_s, fails_at_s, again


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
    ranks: int, *, jobs: int, seed: int, rate_per_hour: float, save_s: float, stop_s: float
) -> list[Comparison]:
    """Compare restarts and in place, each with Daly's interval, and the odds of an interruption."""
    between_s = 3600 / (rate_per_hour * ranks)
    every_s = daly_s(save_s, between_s)
    work_s = 40 * every_s
    found = []
    for in_place in (False, True):
        job = SimulatedJob(
            work_s=work_s, every_s=every_s, save_s=save_s, stop_s=stop_s, between_s=between_s, in_place=in_place
        )
        draws = random.Random(seed)  # noqa: S311 (a simulation)
        walls_s = [wall_s(job, draws) for _ in range(jobs)]
        shares = [work_s / seconds for seconds, _ in walls_s]
        mean_s = statistics.fmean(seconds for seconds, _ in walls_s)
        spread = statistics.stdev(seconds for seconds, _ in walls_s) / mean_s / math.sqrt(jobs)
        formula = (
            goodput_in_place(every_s, save_s=save_s, recovery_s=stop_s, between_s=between_s)
            if in_place
            else goodput_restarts(every_s, save_s=save_s, restart_s=stop_s, between_s=between_s)
        )
        found.append(
            Comparison(
                what="in place" if in_place else "restarts",
                ranks=ranks,
                formula=formula,
                simulated=work_s / mean_s,
                error=spread * statistics.fmean(shares),
                jobs=jobs,
            )
        )
    draws = random.Random(seed + 1)  # noqa: S311 (a simulation)
    hours = 24.0
    hit = statistics.fmean(any(draws.expovariate(rate_per_hour) < hours for _ in range(ranks)) for _ in range(jobs))
    found.append(
        Comparison(
            what=f"odds in {hours:g} h",
            ranks=ranks,
            formula=odds(hours, ranks, rate_per_hour),
            simulated=hit,
            error=math.sqrt(max(hit * (1 - hit), 1 / jobs) / jobs),
            jobs=jobs,
        )
    )
    return found


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


def simulate(chosen: argparse.Namespace) -> Table:
    """Simulated failures, saves and restarts of 8 to 1,024 ranks compared with the formulas of `hvdlaunch estimate`.

    Status 1 if one is off by more than three standard errors.
    """
    table = Table(
        name="simulate",
        question=f"Formulas of hvdlaunch estimate against {chosen.jobs} simulated jobs each:",
        columns=["what", "ranks", "formula", "simulated", "standard error", "within 3"],
    )
    for ranks in (8, 64, 256, 1024):
        compared = goodputs(ranks, jobs=chosen.jobs, seed=ranks, rate_per_hour=1.2e-4, save_s=20.0, stop_s=300.0)
        for one in [*compared, stragglers(ranks, jobs=chosen.jobs, seed=ranks)]:
            numbers = (f"{value:.4f}" for value in (one.formula, one.simulated, one.error))
            table.add(one.what, one.ranks, *numbers, "yes" if one.agrees else "no")
            table.holds = table.holds and one.agrees
    return table


CASES = {"simulate": Case(measure=simulate, options={"jobs": 1000})}
