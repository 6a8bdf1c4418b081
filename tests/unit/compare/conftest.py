"""Comparisons without pictures, which take nearly all of their time."""

import pytest
from matplotlib.figure import Figure

from hvdtrain.compare import drawings


@pytest.fixture
def without_pictures(monkeypatch):
    """An empty figure stands for every picture; test_drawings.py draws them."""
    for name in ("draw_curves", "draw_scaling"):
        monkeypatch.setattr(drawings, name, lambda *_: Figure(figsize=(1, 1)))
