"""The site of docs/, opened from a folder, as a person sees it in Chromium."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("index", "reference/options", "reference/hvdlaunch", "explanation/benchmarks", "how-to/troubleshooting")
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(browser):
    """The address of the site, as the docs are now; sphinx rebuilds what has changed since `make docs`."""
    folder = DOCS.parent / "build/docs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "docs.lock").open("w") as lock:  # processes of pytest share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "-m", "sphinx", "--quiet", str(DOCS), str(folder)], check=True)
    return folder.as_uri()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("straggler", "explanation/fault-model"),
        ("early stopping", "how-to/own-loop"),
        ("delete checkpoint", "how-to/keep-and-delete"),
        ("port 2222", "how-to/ranks-and-hosts"),
    ],
)
def test_the_search_finds_the_page_for_it(browser, site, words, name):
    page = browser.new_page()
    page.goto(f"{site}/search.html?q={words.replace(' ', '+')}")
    page.locator("ul.search li a").first.wait_for()
    found = page.locator("ul.search li a").evaluate_all("links => links.map(link => link.href)")
    assert any(address.startswith(f"{site}/{name}.html") for address in found[:5])


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_a_phone(browser, site, name):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{site}/{name}.html")
    widths = page.locator("html, .content").evaluate_all("parts => parts.map(part => part.scrollWidth)")
    assert [width <= 390 for width in widths] == [True, True]
