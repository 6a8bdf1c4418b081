import json
import os

import pytest

from hvdtrain.ranks import cores
from tests.unit.settings.safety.test_limits import group


@pytest.fixture(autouse=True)
def no_quota(monkeypatch, tmp_path):
    """No control group of this machine."""
    monkeypatch.setattr(cores, "ROOT", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("own", "launcher", "local_size", "together"),
    [
        (range(8), range(8), 4, 8),  # unbound: all share what the launcher may use
        ([3], range(8), 4, 4),  # bound to a core each
        (range(4), range(8), 4, 8),  # two ranks to a NUMA node
        (range(4), range(8), 1, 4),  # alone and bound
        ([2, 3], [2, 3], 4, 2),  # a container of two cores
        ([5], [0], 2, 2),  # bound, and so is the launcher, elsewhere
    ],
)
def test_the_cores_of_all_ranks_of_a_host(monkeypatch, own, launcher, local_size, together):
    monkeypatch.delenv("HVDLAUNCH_RANK", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: set(own), 4711: set(launcher)}[pid])
    assert cores.count_host_cores(local_size) == together
    # The parent is another program, which is bound as well, but hvdlaunch tells.
    monkeypatch.setenv("HVDLAUNCH_RANK", json.dumps({"cores": [*launcher]}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    assert cores.count_host_cores(local_size) == together


@pytest.mark.parametrize(("text", "together"), [("350000 100000", 3), ("10000 100000", 1)])
def test_cores_that_a_quota_does_not_pay_for_do_not_count(monkeypatch, tmp_path, text, together):
    monkeypatch.setattr(cores, "ROOT", group(tmp_path, "0::/\n", **{"cpu.max": text}))
    monkeypatch.setenv("HVDLAUNCH_RANK", json.dumps({"cores": [*range(8)]}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.count_host_cores(4) == together
