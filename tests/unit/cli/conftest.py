import os

import pytest

from tests.unit.machines import NO_GPU, PIX4


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder with saved topologies, a PATH without any program, and a user who is not root."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pix4.txt").write_text(PIX4)
    (tmp_path / "cpu.json").write_text(NO_GPU)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    (tmp_path / "p2p.txt").write_text("\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n")
    monkeypatch.chdir(tmp_path)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": "/home/me", "NCCL_DEBUG": "INFO", "MY_TOKEN": "s3cret!"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return tmp_path
