"""Comparisons without pictures, which take nearly all of their time."""

import io

import pytest
from PIL import Image

from hvdtrain.compare import drawings


@pytest.fixture
def without_pictures(monkeypatch):
    """One pixel stands for every picture; test_drawings.py and test_page.py draw them."""
    pixel = io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, "png")
    for name, result in (("draw_curves", None), ("draw_scaling", None), ("to_svg", b""), ("to_png", pixel.getvalue())):
        monkeypatch.setattr(drawings, name, lambda _, result=result: result)
