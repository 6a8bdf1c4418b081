"""Agreement between ranks before any of them acts: decisions, and facts that must be equal on all ranks."""

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput

Decision = TypeVar("Decision")


def agree(comm: Comm, decide: Callable[[], Decision]) -> Decision:
    """Return the result of `decide`; if it raises BadInput on any rank, raise the first such error on all ranks."""
    decision: list[Decision] = []
    error = None
    try:
        decision.append(decide())
    except BadInput as bad:
        error = str(bad)
    errors = comm.allgather([socket.gethostname(), error])
    failed = [(rank, host, text) for rank, (host, text) in enumerate(errors) if text is not None]
    if failed:
        rank, host, text = failed[0]
        is_everywhere = len(failed) == comm.size and len({text for _, _, text in failed}) == 1
        agreed = BadInput(text if is_everywhere else f"rank {rank} on {host}: {text}")
        agreed.is_agreed = True
        raise agreed
    return decision[0]


def require_equal(comm: Comm, facts: Mapping[str, Any]) -> None:
    """Raise BadInput on all ranks, with both values, if a rank's facts (JSON values) differ from rank 0's."""
    facts_by_rank = comm.allgather([socket.gethostname(), dict(facts)])
    first_host, first_facts = facts_by_rank[0]
    for rank, (host, rank_facts) in enumerate(facts_by_rank):
        for name in first_facts.keys() | rank_facts.keys():
            if first_facts.get(name) != rank_facts.get(name):
                raise BadInput(
                    f"ranks disagree on {name}: rank 0 on {first_host} has {first_facts.get(name)!r}, rank {rank} on "
                    f"{host} has {rank_facts.get(name)!r}. Start all ranks with the same command, code and software."
                )
