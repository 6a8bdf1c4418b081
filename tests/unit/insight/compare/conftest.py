"""Comparisons without pictures, which take nearly all of their time."""

import pytest
from matplotlib.figure import Figure

from hvdtrain.insight.compare import drawings


@pytest.fixture
def without_pictures(monkeypatch):
    """An empty figure stands for every picture; test_drawings.py draws them."""
    monkeypatch.setattr(drawings, "draw_scaling", lambda *_: Figure(figsize=(1, 1)))
