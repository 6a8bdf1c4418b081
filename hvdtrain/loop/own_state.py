"""The state of a program's own loop: values for checkpoints, and its request to finish early."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, str, Tensor, nn.Parameter)


class OwnState:
    """Values that a program keeps in checkpoints, and why its training has ended early, if it has."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.stopped: str | None = None  # the reason on which all ranks have agreed
        self.request: str | None = None  # the reason of this rank
        self.problem: str | None = None  # of a call of this rank; all ranks end with it

    def state_dict(self) -> dict[str, Any]:
        """Return the values and the end, for a checkpoint."""
        return {"values": self.values, "stopped": self.stopped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values into the dict that the program has."""
        self.values.clear()
        self.values.update(state["values"])
        self.stopped = state["stopped"]

    def find_problem(self) -> str | None:
        """Return one line for a call that cannot work, or a value that cannot be saved; None if all is well."""
        if self.problem is not None:
            return self.problem
        try:
            found = next(filter(None, (_unsavable(f"[{name!r}]", value) for name, value in self.values.items())), None)
        except RecursionError:
            found = " is nested too deeply"
        if found is None:
            return None
        return f"training.state{found}. Keep numbers, texts, lists, tuples, dicts and tensors of torch in it."


def _unsavable(place: str, value: Any) -> str | None:
    """Return the place and the type of the first value that a checkpoint cannot hold."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind is dict:
        keys = (_unsavable(f"{place}: its key {name!r}", name) for name in value if type(name) not in _PLAIN[1:5])
        below = (_unsavable(f"{place}[{name!r}]", one) for name, one in value.items())
        return next(filter(None, (*keys, *below)), None)
    if kind in (list, tuple):
        return next(filter(None, (_unsavable(f"{place}[{index}]", one) for index, one in enumerate(value))), None)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{place} is a {name}, which a checkpoint cannot hold"
