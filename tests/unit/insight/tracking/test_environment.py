import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from hvdtrain.insight.tracking import environment


def test_the_command_has_the_launcher_before_it(monkeypatch):
    words = ["-m", "hvdtrain.effnet", "--epochs", "1"]
    launched = ["mpirun", "-np", "2", "python", *words]
    parents = [Mock(cmdline=lambda line=line: line) for line in (launched, ["bash"], ["python", "other.py"])]
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", *words])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    assert environment.environment()["command"] == launched
    parents[0].cmdline = lambda: ["orted"]
    assert environment.environment()["command"] == ["/venv/bin/python", *words]


COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
PACKED = f"# pack-refs with: peeled fully-peeled sorted\n{OTHER} refs/heads/a\n{COMMIT} refs/heads/main\n^{OTHER}\n"
ON_MAIN = "ref: refs/heads/main\n"


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({".git/HEAD": ON_MAIN, ".git/refs/heads/main": f"{COMMIT}\n"}, COMMIT),
        ({".git/HEAD": ON_MAIN, ".git/packed-refs": PACKED}, COMMIT),
        ({".git/HEAD": ON_MAIN, ".git/packed-refs": PACKED, ".git/refs/heads/main": OTHER}, OTHER),  # newer
        ({".git/HEAD": f"{COMMIT}\n"}, COMMIT),  # no branch
        (  # a worktree: it has its own HEAD, and the branches of the others
            {
                ".git": "gitdir: ../main/.git/worktrees/here\n",
                "../main/.git/worktrees/here/HEAD": ON_MAIN,
                "../main/.git/worktrees/here/commondir": "../..\n",
                "../main/.git/refs/heads/main": COMMIT,
            },
            COMMIT,
        ),
        ({".git/HEAD": ON_MAIN, ".git/packed-refs": PACKED.replace("main", "mainly")}, None),
        ({".git/HEAD": "\xff"}, None),
        ({"../.git/HEAD": COMMIT}, None),  # of a project that this one is installed in
    ],
)
def test_the_commit_is_read_from_gits_own_files(monkeypatch, tmp_path, files, commit):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HVDTRAIN_COMMIT", raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "here/hvdtrain/insight/tracking/environment.py"))
    (tmp_path / "here").mkdir()
    for name, content in files.items():
        file = tmp_path / "here" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="latin-1")
    assert environment.environment()["commit"] == commit
    monkeypatch.setenv("HVDTRAIN_COMMIT", "v1-2-gabc1234-dirty")  # of an image
    assert environment.environment()["commit"] == "v1-2-gabc1234-dirty"


def test_the_environment_is_json_and_names_what_changes_a_result(monkeypatch):
    versions = environment.versions()
    packages = {"python", "torch", "torchvision", "horovod", "mpi4py", "numpy", "tokenizers"}
    assert set(versions) == packages | {"nccl", "cuda", "nvidia_driver", "mpi"}
    found = json.loads(json.dumps(environment.environment()))
    assert found["command"][1 - len(sys.orig_argv) :] == sys.orig_argv[1:]
    assert torch.__version__.startswith(found["torch"])
    assert found["code_sha256"] == environment.code_hash()
    monkeypatch.setattr(sys, "argv", [__file__])
    assert environment.environment()["program_sha256"] == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert environment.environment()["program_sha256"] is None
    monkeypatch.setattr(environment, "version", Mock(side_effect=environment.PackageNotFoundError))
    assert environment.package_versions.__wrapped__()["horovod"] is None
