import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from launch.errors import ProcessError
from launch.machine import software
from launch.machine.software import read_software
from launch.process import Answer


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with made-up packages, the only ones there are, and a project without git."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(software, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(software, "PROJECT", tmp_path / "project")
    monkeypatch.delenv("HVDTRAIN_COMMIT", raising=False)

    def add(name, version):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    (tmp_path / "project/launch").mkdir(parents=True)
    return add


def test_what_is_not_there_is_none(packages):
    own = read_software()
    assert own.python == ".".join(map(str, sys.version_info[:3]))
    facts = {own.torch, own.horovod, own.horovod_has_nccl, own.nccl, own.cuda, own.driver, own.project, own.commit}
    assert facts == {None}


def test_versions_are_those_of_the_packages_and_of_torchs_own_record(packages, tmp_path):
    text = b"__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_bytes(text)
    packages("torch", "2.11.0")
    packages("nvidia-nccl-cu13", "2.28.9")
    packages("hvdtrain", "0.1.0")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("570.86.15\n")
    own = read_software()
    found = (own.torch, own.cuda, own.nccl, own.driver, own.project)
    assert found == ("2.11.0", "13.0", "2.28.9", "570.86.15", "0.1.0")
    (tmp_path / "torch/version.py").write_bytes(b"cuda: Optional[str] = None\n")
    assert (read_software().cuda, read_software().nccl) == (None, None)


@pytest.mark.parametrize(
    ("library", "built"),
    [(b"\x7fELF ncclAllReduce", True), (b"\x7fELF MPI_Allreduce", False), (b"", False), (None, None)],
)
def test_horovod_has_nccl_if_its_library_calls_it(packages, tmp_path, library, built):
    packages("horovod", "0.28.1")
    (tmp_path / "horovod/torch").mkdir(parents=True)
    if library is not None:
        (tmp_path / "horovod/torch/mpi_lib_v2.cpython-311.so").write_bytes(library)
    own = read_software()
    assert (own.horovod, own.horovod_has_nccl) == ("0.28.1", built)


def test_the_commit_is_that_of_the_image_or_of_git(packages, tmp_path, monkeypatch):
    answers = [Answer(status=0, out="abc123\n", err=""), Answer(status=128, out="", err="dubious ownership")]
    monkeypatch.setattr(software, "ask", lambda *_, **__: answers.pop(0))
    assert read_software().commit is None  # no checkout, whatever lies above it
    (tmp_path / "project/.git").touch()
    assert [read_software().commit, read_software().commit] == ["abc123", None]
    monkeypatch.setattr(software, "ask", Mock(side_effect=ProcessError("git cannot be started")))
    assert read_software().commit is None
    monkeypatch.setenv("HVDTRAIN_COMMIT", "built")
    assert read_software().commit == "built"


def test_a_change_in_either_package_changes_the_code(packages, tmp_path):
    codes = [read_software().code]
    for file in ("launch/a.py", "hvdtrain/b.py", "hvdtrain/c.py"):
        path = tmp_path / "project" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
        codes.append(read_software().code)
    path.rename(path.with_name("d.py"))
    codes.append(read_software().code)
    assert len(set(codes)) == 5
    of_launch = software.code_digest("launch")
    (tmp_path / "project/hvdtrain/x.py").touch()
    (tmp_path / "project/launch/.#x.py").symlink_to("somebody@here.4711:1700000000")  # an editor's lock
    assert software.code_digest("launch") == of_launch


def test_of_this_environment_all_is_known_without_importing_it():
    own = read_software()
    assert None not in {own.torch, own.horovod, own.horovod_has_nccl, own.project}
    assert (Path(software.PROJECT) / "launch").is_dir()
