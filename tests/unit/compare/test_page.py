import base64
import re

from PIL import Image

from hvdtrain.compare import __main__ as compare

from .runfolders import make_run


def test_page_needs_nothing_but_itself(tmp_path):
    make_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"), config={"lr": "<b>"})
    make_run(tmp_path / r"b$\frac$")  # which would be wrong as a formula
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert b"<svg" in base64.b64decode(picture)
    with Image.open(tmp_path / "out" / "curves.png") as drawn:
        assert drawn.size == (1560, 832)
    assert not list((tmp_path / "out").glob("*.part"))
