import json
import os

import pytest

from tests.unit.machines import NO_GPU, PIX4


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder with saved topologies and measurements, a PATH without any program, and a user who is not root.

    Of four GPUs the ring by kind is 0-2-1-3, but 0 and 1 were measured faster than by kind.
    """
    rows = [[None, 30.0, 10.0, 10.0], [30.0, None, 10.0, 10.0], [10.0, 10.0, None, 10.0], [10.0, 10.0, 10.0, None]]
    links = [{"host": "a", "gpus": [0, 1, 2, 3], "uuids": [None] * 4, "gb_per_s": rows}]
    (tmp_path / "m.json").write_text(json.dumps({"bandwidth": {"gpu_links": links}}))
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
