import time

import pytest

from launch.errors import ProcessError
from launch.machine import local, nvml
from tests.unit.machines import machine


@pytest.mark.parametrize(("timeout_s", "gpus"), [(0.1, None), (5.0, 4)])
def test_a_driver_that_wakes_up_slowly_has_so_long(monkeypatch, timeout_s, gpus):
    monkeypatch.setattr(nvml, "read_nvml", lambda: time.sleep(0.3) or machine())
    if gpus is None:
        with pytest.raises(ProcessError, match=r"^NVML did not .* 0\.1 s.*--driver-timeout-s"):
            local.local_topology(gpus=True, timeout_s=timeout_s)
    else:
        assert len(local.local_topology(gpus=True, timeout_s=timeout_s).gpus) == gpus
