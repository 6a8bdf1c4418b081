"""The project on a simulated GPU, in a process of its own: see start.py."""

import os
import platform
import xml.etree.ElementTree as ET

import pytest

from tests.simgpu.start import start_pytest, what_is_missing


def run_inside(folder, *words):
    """How many tests have passed there; all of them."""
    if missing := what_is_missing():
        if "CI" in os.environ and platform.machine() == "x86_64":
            pytest.fail(f"{missing}, and CI has to have one")
        pytest.skip(missing)
    report = folder / "report.xml"
    done = start_pytest(folder, ["-q", f"--junitxml={report}", *words])
    assert done.returncode == 0, done.stdout
    [suite] = ET.parse(report).getroot()  # noqa: S314 (pytest's own)
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0"), done.stdout
    return int(suite.get("tests"))


@pytest.mark.timeout(900)  # of a busy machine
def test_steps_runs_and_planted_faults(tmp_path):
    assert run_inside(tmp_path, "tests/simgpu/inside") > 12


@pytest.mark.slow
@pytest.mark.long  # two minutes of variants
@pytest.mark.timeout(1500)
def test_pairs_of_kinds_of_steps_and_more_runs(tmp_path):
    assert run_inside(tmp_path, "tests/simgpu/inside", "-m", "slow") > 20
