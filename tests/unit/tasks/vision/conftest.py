import pytest

from tests.unit.tasks.vision.data_sets import put_in_place


@pytest.fixture
def cifar(monkeypatch):
    return put_in_place(monkeypatch)
