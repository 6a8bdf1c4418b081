import os

from tests.simgpu.start import INSIDE

collect_ignore = [] if INSIDE in os.environ else ["inside"]  # needs a process of its own, which test_simgpu.py starts


def pytest_collection_modifyitems(items):
    """Its tests first: as the last ones they would keep one worker busy when the others have nothing left."""
    items.sort(key=lambda item: "tests/simgpu/" not in item.nodeid)
