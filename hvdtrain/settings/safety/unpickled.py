"""Checks before torch.load: in torch before 2.10, a crafted file can run code in spite of weights_only=True.

CVE-2026-24747. The torch 2.7.1 for CUDA 12.6 is affected.
"""

import os
from importlib.metadata import version
from pathlib import Path

from hvdtrain.settings.safety.exits import BadInput


def is_load_safe() -> bool:
    """Return whether torch.load(weights_only=True) is safe for untrusted files."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 10)


def refuse_weights(source: str, instead: str) -> None:
    """Raise BadInput for a file of weights, which may come from anywhere, if this torch cannot load it safely."""
    if not is_load_safe():
        raise BadInput(
            f"--pretrained {source}: torch {version('torch')} could run code hidden in such a file (CVE-2026-24747, "
            f"fixed in 2.10). {instead}."
        )


def refuse_other_users(folder: Path) -> None:
    """Raise BadInput for another user's folder if this torch cannot load its files safely.

    Without the folder on this host the content comes from rank 0, which has looked.
    """
    if not is_load_safe() and folder.exists() and folder.stat().st_uid != os.geteuid():
        raise BadInput(f"another user's, and torch {version('torch')} could run code hidden in it (CVE-2026-24747)")
