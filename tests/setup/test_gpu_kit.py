"""The kit for a quarter of an hour on a GPU, made for this environment's Python and torch, with its kept Horovod."""

import os
import sys
from pathlib import Path

import pytest

from tests.setup.commands import run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.long]  # two minutes, and a release has it tried


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """The kit, tested without a network as it is made."""
    folder = tmp_path_factory.mktemp("kit") / "kit"
    assert "2 of 2 steps are OK" in printed([ROOT / "scripts/gpu_kit.sh", folder], IMAGE=sys.prefix)
    return folder


def printed(words, **env):
    """What this command prints on standard output."""
    done = run(words, env={**os.environ, **env}, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rehearse(kit, work, minutes, *words):
    """Run the driver as on the machine, without a network; return its last line."""
    command = [ROOT / "scripts/without_network.sh", "bash", kit / "quarter.sh", kit, work / "output", str(minutes)]
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    return printed([*command, "--rehearse", *words], WORK=str(work), PATH=path).splitlines()[-1]


def test_the_kit_trains_from_its_wheels(kit, tmp_path):
    assert rehearse(kit, tmp_path, 4, "--only", "start").startswith("1 of 1 steps are OK")


@pytest.mark.timeout(2400)  # all steps one after the other on CPUs
def test_every_step_runs_or_says_why_not(kit, tmp_path):
    others = rehearse(kit, tmp_path, 35).partition("others: ")[2]
    assert all(word.endswith("NO GPU") for word in others.split(", ")), others
