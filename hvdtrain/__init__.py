"""hvdtrain: PyTorch training with Horovod and MPI that starts right and keeps its accuracy as ranks grow."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"]:  # python -m hvdtrain.effnet, which imports torch later
    from hvdtrain.settings.safety.limits import require_room

    require_room(os.environ)

if "_HVDTRAIN_READER_OF" in os.environ:  # as early as possible: the rank of this reader process may already be gone
    from hvdtrain.settings.safety.reader_processes import end_with_rank

    end_with_rank(int(os.environ.pop("_HVDTRAIN_READER_OF")))

if TYPE_CHECKING:
    from hvdtrain.core.blocks import Cuts as Cuts
    from hvdtrain.core.task import Sums as Sums
    from hvdtrain.core.task import Task as Task
    from hvdtrain.loop.feed.feed import Resident as Resident
    from hvdtrain.loop.feed.feed import Split as Split
    from hvdtrain.loop.hooks import EpochDone as EpochDone
    from hvdtrain.loop.reports import Report as Report
    from hvdtrain.program.run import Run as Run
    from hvdtrain.program.settings import Settings as Settings
    from hvdtrain.program.start import start as start
    from hvdtrain.program.training import Training as Training
    from hvdtrain.settings.safety import errors as errors
    from hvdtrain.settings.safety.errors import BadInput as BadInput

_MODULES = {
    "start": "program.start",
    "Run": "program.run",
    "Settings": "program.settings",
    "Task": "core.task",
    "Sums": "core.task",
    "Split": "loop.feed.feed",
    "Resident": "loop.feed.feed",
    "Cuts": "core.blocks",
    "Training": "program.training",
    "Report": "loop.reports",
    "EpochDone": "loop.hooks",
    "BadInput": "settings.safety.errors",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: bad settings are refused without torch, whose import takes seconds."""
    if name == "errors":
        return import_module("hvdtrain.settings.safety.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(import_module(f"hvdtrain.{_MODULES[name]}"), name)
