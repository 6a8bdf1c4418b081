"""What a start need not wait for, and no circles: modules that a script, or a file of a room, does not import."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
NEVER_AT_FIRST = {"matplotlib", "sklearn", "scipy", "pandas", "horovod", "mpi4py", "launch", "tensorflow"} | {
    "torch.distributed.pipelining"
}
HEAVY = {"torch", "torchvision", "numpy", "tensorboard", "tokenizers", "safetensors", "PIL", "tqdm"} | NEVER_AT_FIRST
IMPORT = """
import importlib, os, sys
import torch

for script in ("effnet", "bert"):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        importlib.import_module("hvdtrain." + script)
        print(script, *sys.modules, flush=True)
        os._exit(0)
os._exit(0)  # to clear up would take a second
"""


def run(*words, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_imports_nothing_that_its_start_does_not_need():
    done = run("-c", IMPORT)
    imported = {script: set(names) for script, *names in map(str.split, done.stdout.splitlines())}
    assert imported.keys() == {"effnet", "bert"}, done.stderr
    vision = {"torchvision", "hvdtrain.tasks.vision", "transformers", "huggingface_hub", "simple_icd_10_cm"}
    assert not NEVER_AT_FIRST & imported["effnet"]
    assert not (NEVER_AT_FIRST | vision) & imported["bert"]


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):  # as the folder above a clone has one
    (tmp_path / "hvdtrain").mkdir()
    done = run("-c", "import hvdtrain; print(hvdtrain.__file__)", cwd=tmp_path, PYTHONPATH="")
    assert Path(done.stdout.strip()).name == "__init__.py", done.stderr


def imports_of(path):
    """The modules that a file imports anywhere, for types only or in a function as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def circle_of(room):
    """The names of some files of a room that import each other in a circle, if any do."""
    home = ".".join(room.relative_to(PROJECT).parts)
    files = {f"{home}.{path.stem}": path for path in room.glob("*.py")}
    try:
        graphlib.TopologicalSorter({name: files.keys() & {*imports_of(files[name])} for name in files}).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_files_of_a_room_import_each_other_in_a_circle():
    found = [path.parent for package in ("hvdtrain", "launch") for path in (PROJECT / package).rglob("__init__.py")]
    rooms = {str(room.relative_to(PROJECT)): room for room in found}
    assert {"hvdtrain/core", "launch/run/start"} <= rooms.keys()
    circles = {name: circle_of(room) for name, room in rooms.items()}
    known = {"launch/run/start/launchers"}  # types alone: a launcher is made over an Open MPI, and that is one
    assert {name: circle for name, circle in circles.items() if circle and name not in known} == {}


MANY = {"OMPI_COMM_WORLD_LOCAL_SIZE": "10000000", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("words", "environment", "status", "named"),
    [
        ("effnet --help", {}, 0, "--batch-size-per-rank"),
        ("effnet --sync-bn --compile", {}, 2, "--compile does not work with --sync-bn: "),
        ("bert --stages 2 --accumulate-steps 2", {}, 2, "--stages 2: 1 rank cannot be replicas of 2 ranks"),
        ("effnet", {"HOROVOD_FUSION_THRESHOLD": "64MB"}, 2, "HOROVOD_FUSION_THRESHOLD='64MB'"),
        ("bandwidth", MANY, 2, "10000000 ranks need 3500000.0 GB of memory"),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_imported(words, environment, status, named):
    script, *options = words.split()
    done = run("-X", "importtime", "-m", f"hvdtrain.{script}", *options, **environment)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == status
    assert len(said) == (status == 2)
    assert named in "".join([*said, done.stdout])
    assert "hvdtrain" in imported
    assert not HEAVY & imported
