"""A cluster per test, made in a fraction of a second and gone with the test."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.namespaces import why_not

REASON = why_not()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.cluster)
    item.add_marker(pytest.mark.skipif(REASON is not None, reason=f"no cluster of hosts: {REASON}"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Make clusters, as `Cluster` does; they end with the test. Every host sees tmp_path, under its own name."""
    with contextlib.ExitStack() as clusters:

        def make(hosts: int = 2, routed: int | None = None) -> Cluster:
            folder = tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return clusters.enter_context(Cluster(folder, hosts=hosts, routed=routed))

        yield make
