"""The site of docs/, opened from a folder, as a person sees it in Chromium."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("index", "reference/options", "reference/hvdlaunch", "explanation/benchmarks", "how-to/troubleshooting")
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(browser, tmp_path_factory):
    """The address of the site, as the docs are now."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "--quiet", str(DOCS), str(folder)], check=True)
    return folder.as_uri()


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_a_phone(browser, site, name):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{site}/{name}.html")
    widths = page.locator("html, .content").evaluate_all("parts => parts.map(part => part.scrollWidth)")
    assert [width <= 390 for width in widths] == [True, True]
