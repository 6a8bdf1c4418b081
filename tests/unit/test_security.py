"""What lint refuses, and that nothing names a secret where others read it."""

import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.insight.compare import command as compare
from hvdtrain.insight.tracking import environment
from hvdtrain.ranks import connect
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision import models
from scripts.check_loads import complaints
from tests.unit.checkpoint.test_strangers import payloads
from tests.unit.insight.compare.runfolders import make_run

PROJECT = Path(__file__).parents[2]
CANARY = "canary-5f0c2e"
SHIPPED = ["hvdtrain", "launch", "scripts", "bench"]


def test_ruff_refuses_each_of_these_wherever_it_ships(tmp_path):
    """With the project's settings."""
    refused = {
        "S301": "import pickle\n\npickle.Unpickler(file)\n",
        "S506": "import yaml\n\nyaml.load(file, Loader=yaml.Loader)\n",
        "S602": "import subprocess\n\nsubprocess.run(words, shell=True)\n",
        "S604": "run(words, shell=True)\n",
        "S605": "import os\n\nos.system(words)\n",
    }
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for folder in SHIPPED:
        (tmp_path / folder).mkdir()
        for rule, source in refused.items():
            (tmp_path / folder / f"{rule.lower()}.py").write_text(source)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = set(re.findall(r"^(\S+?\.py):\d+:\d+: (\w+)", done.stdout, re.MULTILINE))
    assert {(f"{folder}/{rule.lower()}.py", rule) for folder in SHIPPED for rule in refused} <= found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=flag)",
        "from torch import load as read\nread(file)",
        "import torch\nlist(map(torch.load, files))",
        "from torch import serialization as s\ns.load(file)",
        "def f():\n    from torch.serialization import load\n    return load(file)",
        "import torch\ntorch.hub.load_state_dict_from_url(url)",
        "import torch\ntorch.hub.load(repository, name)",
        "import numpy as np\nnp.load(file, allow_pickle=flag)",
        "import numpy as np\nnp.load(file, None, True)",
        "from joblib import load as read\nread(file)",
        "import cloudpickle\ncloudpickle.loads(content)",
        "import yaml\nread = yaml.load",
    ],
)
def test_check_loads_refuses(source):
    assert len(list(complaints(source))) == 1


def test_check_loads_has_nothing_against_careful_loaders_and_other_names():
    careful = """
import json
import numpy as np
import torch
from hvdtrain.checkpoint import files
torch.load(file, map_location='cpu', weights_only=True)
np.load(file, 'r')
np.load(file, allow_pickle=False)
json.load(file)
files.load(found, name)
"""
    assert list(complaints(careful)) == []


def test_make_lint_checks_the_loads_of_all_that_is_shipped(tmp_path):
    (command,) = re.findall(r"python (scripts/check_loads\.py [\w ]+)", (PROJECT / "Makefile").read_text())
    script, *folders = command.split()
    assert set(folders) == set(SHIPPED)
    (tmp_path / "launch" / "deep").mkdir(parents=True)
    (tmp_path / "launch" / "deep" / "bad.py").write_text("import torch\n\ntorch.load('x')\n")
    check = [sys.executable, str(PROJECT / script), *folders]
    bad = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert bad.stderr.startswith("launch/deep/bad.py:3: torch.load without weights_only=True")


def test_a_comparison_is_its_owners_alone(tmp_path):
    make_run(tmp_path / "a")
    compare.main([str(tmp_path / "a"), "--out", str(tmp_path / "out")])
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_the_environment_of_a_run_is_written_down_without_secrets(monkeypatch):
    for name in ("HOROVOD_SECRET_KEY", "HOROVOD_TOKEN", "NCCL_PASSWORD", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, CANARY)
    for name in ("HOROVOD_AUTOTUNE", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "told")
    known = environment.environment()
    assert CANARY not in str(known)
    assert known["horovod_settings"]["HOROVOD_AUTOTUNE"] == known["nccl_settings"]["NCCL_DEBUG"] == "told"


def test_the_command_of_a_run_is_written_down_without_secrets(monkeypatch):
    secrets = [f"WANDB_API_KEY={CANARY}", f"--api-key={CANARY}", f"aws_secret={CANARY}=={CANARY}"]
    others = ["-x", "WANDB_API_KEY", "--data-dir=/keys/token", "OMP_NUM_THREADS=1", "--max-tokens", "64"]
    monkeypatch.setattr(sys, "orig_argv", ["mpirun", *secrets, "--hub-token", CANARY, *others])
    shown = ["WANDB_API_KEY=...", "--api-key=...", "aws_secret=...", "--hub-token", "..."]
    assert environment.environment()["command"] == ["mpirun", *shown, *others]


@pytest.mark.parametrize(
    ("given", "used"),
    [("", "^tcp"), ("^openib", "^openib,tcp"), ("self,vader", "self,vader"), ("self,tcp", "self,tcp")],
)
def test_ranks_of_one_host_leave_tcp_alone_unless_it_was_asked_for(given, used):
    assert connect._exclude_tcp(given) == used


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pretrained_weights_of_a_stranger_run_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary, weights = tmp_path / "ran", tmp_path / "weights.pt"
    for content in payloads(canary).values():
        weights.write_bytes(content)
        with pytest.raises(BadInput, match=r"weights\.pt: not a file of tensors"):
            models.pretrained_weights("efficientnet_tiny", str(weights))
        assert not canary.exists()
