"""What a start need not wait for: modules that a script does not import before it uses them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEVER_AT_FIRST = {"matplotlib", "sklearn", "scipy", "pandas", "horovod", "mpi4py", "launch", "tensorflow"} | {
    "torch.distributed.pipelining"
}


PROJECT = Path(__file__).parents[2]
TORCHS = ("effnet", "bert", "bandwidth", "program.training")
IMPORT = f"""
import importlib, os, sys

def tell(script):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        try:
            importlib.import_module("hvdtrain." + script)
            print(script, *sys.modules, flush=True)
            os._exit(0)
        finally:
            os._exit(1)

tell("compare.__main__")
import torch
for script in {TORCHS}:
    tell(script)
os._exit(0)  # to clear up would take a second
"""


@pytest.fixture(scope="module")
def modules():
    """The modules that each script has imported at its start, without the stub of torch's compiler."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return {script: set(names) for script, *names in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("script", "besides"),
    [
        ("effnet", set()),
        ("bert", {"torchvision", "hvdtrain.vision", "transformers", "huggingface_hub", "simple_icd_10_cm"}),
        ("bandwidth", {"torch._dynamo", "torchvision", "tensorboard", "sympy", "triton", "PIL"}),
        ("program.training", {"torchvision", "hvdtrain.vision"}),
        ("compare.__main__", {"torch", "matplotlib.pyplot", "tensorboard"}),
    ],
)
def test_a_script_imports_nothing_that_its_start_does_not_need(modules, script, besides):
    never = NEVER_AT_FIRST - ({"matplotlib", "scipy"} if script.startswith("compare") else set())
    assert f"hvdtrain.{script}" in modules[script]
    assert not (never | besides) & modules[script]


def started(*words, **environment):
    """A Python that has ended, the lines of its standard error, and what it has imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words],
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return done, [line for line in lines if not line.startswith("import time:")], imported


@pytest.mark.parametrize("script", ["effnet", "bert", "bandwidth"])
def test_ranks_that_do_not_fit_their_host_import_nothing_heavy(script):
    many = {"OMPI_COMM_WORLD_LOCAL_SIZE": "10000000", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done, (said,), imported = started("-m", f"hvdtrain.{script}", **many)
    assert (done.returncode, done.stdout) == (2, "")
    assert "10000000 ranks need 3500000.0 GB of memory" in said
    assert "hvdtrain" in imported
    assert not {"torch", "numpy", "mpi4py", "psutil"} & imported


HEAVY = {"torch", "torchvision", "numpy", "tensorboard", "tokenizers", "safetensors", "PIL", "tqdm"} | NEVER_AT_FIRST


@pytest.mark.parametrize("room", ["vision", "text"])
def test_settings_import_nothing_heavy(room):
    done, said, imported = started("-c", f"from hvdtrain.{room} import settings; settings.parse([])")
    assert (done.returncode, said) == (0, [])
    assert f"hvdtrain.{room}.settings" in imported
    assert not HEAVY & imported


@pytest.mark.parametrize(
    ("words", "environment", "status", "named"),
    [
        ("effnet --help", {}, 0, "--batch-size-per-rank"),
        ("bert --help", {}, 0, "--max-tokens"),
        ("effnet --no-such 1", {}, 2, "--no-such 1: unknown option"),
        ("bert --epochs 0", {}, 2, "--epochs 0: must be at least 1"),
        ("effnet --model resnet50", {}, 2, "--model resnet50: unknown"),
        ("effnet --sync-bn --compile", {}, 2, "--compile does not work with --sync-bn: "),
        ("bert --stages 2 --accumulate-steps 2", {}, 2, "--stages 2: 1 rank cannot be replicas of 2 ranks"),
        ("effnet --elastic", {}, 2, "--elastic needs several ranks"),
        ("effnet", {"HOROVOD_FUSION_THRESHOLD": "64MB"}, 2, "HOROVOD_FUSION_THRESHOLD='64MB'"),
        ("bert --timeline", {}, 2, "--timeline: only Horovod has one"),
    ],
)
def test_what_the_settings_have_wrong_is_said_before_torch_is_imported(words, environment, status, named):
    script, *options = words.split()
    done, said, imported = started("-m", f"hvdtrain.{script}", *options, **environment)
    assert done.returncode == status
    assert len(said) == (status == 2)
    assert named in "".join([*said, done.stdout])
    assert not HEAVY & imported
