"""The project on a simulated GPU, in a process of its own: see start.py."""

import itertools
import os
import platform
import xml.etree.ElementTree as ET

import pytest

from tests.simgpu import cases
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


def test_each_pair_that_is_possible_is_tried():
    tried = {pair for case in cases.default() for pair in itertools.combinations(case.items(), 2)}
    plain = {factor: next(iter(values)) for factor, values in cases.FACTORS.items()}
    for (first, ones), (second, others) in itertools.combinations(cases.FACTORS.items(), 2):
        for one, other in itertools.product(ones, others):
            is_wanted = cases.is_possible(plain | {first: one, second: other}) and not {one, other} & {*cases.LEFT_OUT}
            assert ((first, one), (second, other)) in tried or not is_wanted


@pytest.mark.timeout(900)  # of a busy machine
def test_steps_runs_and_planted_faults(tmp_path):
    assert run_inside(tmp_path, "tests/simgpu/inside") >= len(cases.default()) + 35


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_whole_runs_and_replicas_of_several_ranks(tmp_path):
    files = (f"tests/simgpu/inside/test_{name}.py" for name in ("runs", "replicas"))
    assert run_inside(tmp_path, *files, "-m", "slow") >= 1


@pytest.mark.slow
@pytest.mark.timeout(1500)  # 192 s of a core for 326 of them; a third are left
def test_all_kinds_of_steps(tmp_path):
    assert run_inside(tmp_path, "tests/simgpu/inside/test_steps.py", "-m", "slow") > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_needs_a_gpu_passes_on_a_simulated_one(tmp_path):
    words = ["-p", "tests.simgpu.as_gpu", "tests/gpu", "-k", "prefetched or feed_waits or never_wait"]
    assert run_inside(tmp_path, *words) == 7
