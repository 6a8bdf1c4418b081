"""The modules that a rank has imported, for the keepers of hvdlaunch, whose forks then start with all of them."""

import contextlib
import os
import sys
from pathlib import Path

from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety.files import write_atomically

# Packages whose imports start neither MPI nor CUDA nor threads; a user's are not among them.
PACKAGES = {"hvdtrain", "horovod", "numpy", "PIL", "psutil", "pynvml", "safetensors", "scipy", "sklearn", "tensorboard"}
PACKAGES |= {"tokenizers", "torch", "torchvision"}
LOOKED_UP = "hvdtrain.insight.tracking.looked_up"


def report_imports() -> None:
    """Report the modules, in order, in a file next to the other facts, if hvdlaunch starts keepers."""
    report = os.environ.get("HVDLAUNCH_REPORT")
    if report and fact(os.environ, "keeper", ""):
        names = [name for name in list(sys.modules) if name.partition(".")[0] in PACKAGES]
        with contextlib.suppress(OSError):  # this host may not share the folder
            write_atomically(Path(report).with_name("imports"), " ".join([*names, LOOKED_UP]).encode())
