"""The image under test, and containers of it that end with their test."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import why_not
from tests.image.containers import Container, Image, buildah, open_image

REASON = why_not() or (None if shutil.which("buildah") else "not installed: buildah")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.image)
    item.add_marker(pytest.mark.skipif(REASON is not None, reason=f"no containers: {REASON}"))


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    opened, container = open_image(os.environ.get("IMAGE", "hvdtrain"))
    yield opened
    buildah("rm", container)


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Make containers, as `Container` does."""
    with contextlib.ExitStack() as containers:

        def make(name: str = "one", **how) -> Container:
            made = Container(image, name, tmp_path, **how)
            containers.callback(made.end)
            return made

        yield make
