"""Sphinx: the pages of docs/ as a site, which opens from a folder as well as from a server."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
release = version = _PROJECT["version"]
html_title = f"{project} {release}"
author = copyright = "the hvdtrain contributors"  # noqa: A001 (Sphinx's name)

extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to headings, as on GitHub
smartquotes = False  # two dashes are an option

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_search_summary = False  # it fetches the pages that are found, and no browser fetches from a folder
pygments_style = "friendly"
pygments_dark_style = "github-dark"
