"""The facts that hvdlaunch passes to a rank: a JSON object in one variable (docs/reference/environment.md)."""

import contextlib
import json
from collections.abc import Mapping
from typing import TypeVar

from hvdtrain.settings.safety.errors import BadInput

VARIABLE = "HVDLAUNCH_RANK"

T = TypeVar("T")


def fact(environment: Mapping[str, str], name: str, default: T) -> T:
    """Return a fact of this rank, the default without hvdlaunch; BadInput if the variable is not from hvdlaunch."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        value: T = json.loads(environment.get(VARIABLE, "{}")).get(name, default)
        if type(value) is type(default):
            return value
    raise BadInput(f"{VARIABLE}: not the JSON that hvdlaunch sets. Unset it.")
