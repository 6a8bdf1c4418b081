"""A plugin for pytest: all its tests see a simulated GPU, and fail if it finds something wrong."""

import gc

import pytest

from tests.simgpu.simulator.cuda import simulated

_context = simulated()


def pytest_configure(config):
    config.simulated_gpu = _context.__enter__()


def pytest_unconfigure(config):
    _context.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _nothing_is_found(request):
    gpu = request.config.simulated_gpu
    gpu.findings.clear()
    yield
    gc.collect(0)
    assert [str(finding) for finding in gpu.findings] == []
