"""The combined clocks of all ranks, for users and for files."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hvdtrain.core.phases import PHASES, Phase, Phases
from hvdtrain.insight.profiling.parts import compute_parts
from hvdtrain.insight.profiling.verdict import REMEDIES, RankMeans, judge, waits_for_cores
from hvdtrain.ranks.comm import Comm


class Profile:
    """The mean step of every rank, and the conclusions from it."""

    def __init__(self, ranks: Sequence[RankMeans], remedies: Mapping[Phase, str] = REMEDIES) -> None:
        self.ranks = ranks
        self.verdict = judge(ranks, remedies)
        self.parts = compute_parts(ranks, remedies)  # None unless both passes were measured

    def summary(self) -> dict[str, Any]:
        """Return the verdict, for result.json."""
        values = asdict(self.verdict)
        return {"verdict": values.pop("kind"), **values}

    def lines(self) -> list[str]:
        """Return the verdict as Markdown; after both passes the parts instead, preceded by the straggler, if any."""
        if self.parts is None:
            return [self.verdict.sentence]
        straggler = [self.verdict.sentence, ""] if self.verdict.kind == "straggler" else []
        return [*straggler, self.parts.sentence + waits_for_cores(self.ranks), "", *self.parts.table()]

    def document(self) -> dict[str, Any]:
        """Return phases.json: minimum, median and maximum of each phase over ranks, then each rank's means.

        If both passes were measured, it includes the parts, and each rank's isolated phases as `alone_s`.
        """
        slowest = max(self.ranks, key=lambda means: means.work_s)
        phases = {}
        for phase in PHASES:
            seconds = [means.phases_s[phase] for means in self.ranks]
            longest = max(self.ranks, key=lambda means: means.phases_s[phase])
            phases[phase] = {
                "min_s": min(seconds),
                "median_s": median(seconds),
                "max_s": longest.phases_s[phase],
                "max_rank": longest.rank,
                "max_host": longest.host,
            }
        return {
            **self.summary(),
            "steps": self.ranks[0].steps,
            "step_s": median(means.step_s for means in self.ranks),
            "slowest": {"rank": slowest.rank, "host": slowest.host, "own_s": slowest.work_s},
            "phases": phases,
            **(self.parts.document() if self.parts else {}),
            "ranks": [{**asdict(means), "sum_s": means.sum_s} for means in self.ranks],
        }


def gather_profile(comm: Comm, phases: Phases, remedies: Mapping[Phase, str] = REMEDIES) -> Profile | None:
    """Gather the profile of all ranks; None if their clocks are off or still warming up. Called by every rank.

    `remedies` apply if the input limits the run.
    """
    means = phases.means()
    if means is None:
        return None
    facts = {"rank": comm.rank, "host": socket.gethostname(), **asdict(means)}
    return Profile([RankMeans(**means) for means in comm.allgather(facts)], remedies)
