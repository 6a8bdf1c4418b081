import json
import sys
from types import SimpleNamespace

import psutil
import torch

from hvdtrain.record import environment


def test_versions_names_what_changes_a_result():
    found = environment.versions()
    assert set(found) == {"python", "torch", "torchvision", "horovod", "mpi4py", "numpy"}
    assert torch.__version__.startswith(found["torch"])


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def missing(_):
        raise environment.PackageNotFoundError

    monkeypatch.setattr(environment, "version", missing)
    assert environment.versions()["horovod"] is None


def test_code_hash_changes_with_the_code(monkeypatch, tmp_path):
    (tmp_path / "one.py").write_text("a")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "record" / "environment.py"))
    first = environment.code_hash()
    assert len(first) == 64
    assert environment.code_hash() == first
    (tmp_path / "one.py").write_text("b")
    second = environment.code_hash()
    (tmp_path / "one.py").rename(tmp_path / "two.py")
    assert len({first, second, environment.code_hash()}) == 3


def test_the_command_has_the_launcher_before_it(monkeypatch):
    words = ["-m", "hvdtrain.effnet", "--epochs", "1"]
    launched = ["mpirun", "-np", "2", "python", *words]
    lines = [launched, ["bash"], ["python", "other.py"]]
    parents = [SimpleNamespace(cmdline=lambda line=line: line) for line in lines]
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", *words])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    assert environment.environment()["command"] == launched
    parents[0] = SimpleNamespace(cmdline=lambda: ["orted"])
    assert environment.environment()["command"] == ["/venv/bin/python", *words]


def test_the_commit_is_the_images_where_there_is_no_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.environment()["commit"] is None
    monkeypatch.setenv("HVDTRAIN_COMMIT", "abc1234")
    assert environment.environment()["commit"] == "abc1234"


def test_environment_is_json_and_names_the_command():
    found = json.loads(json.dumps(environment.environment()))
    assert found["command"][1 - len(sys.orig_argv) :] == sys.orig_argv[1:]
    assert found["torch"] == environment.versions()["torch"]
    assert all(name.startswith("HOROVOD_") for name in found["horovod_settings"])
