import json

import pytest

from tests.unit.cli.commands import ended, refusal
from tests.unit.machines import PIX4


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Four GPUs whose ring by kind is 0-2-1-3, of which 0 and 1 were measured faster than by kind."""
    rows = [[None, 30.0, 10.0, 10.0], [30.0, None, 10.0, 10.0], [10.0, 10.0, None, 10.0], [10.0, 10.0, 10.0, None]]
    links = [{"host": "a", "gpus": [0, 1, 2, 3], "uuids": [None] * 4, "gb_per_s": rows}]
    (tmp_path / "pix4.txt").write_text(PIX4)
    (tmp_path / "m.json").write_text(json.dumps({"bandwidth": {"gpu_links": links}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_gpus_and_plan_choose_by_what_was_measured(capsys):
    gpus = ("gpus", "--topology", "pix4.txt", "-k", "2")
    assert ended(capsys, *gpus)[1].startswith("GPUs 0,2, ring 0-2")
    status, out, _ = ended(capsys, *gpus, "--measured", "m.json")
    assert (status, out.splitlines()[0]) == (0, "GPUs 0,1, ring 0-1, 30 GB/s")
    assert "slowest link of the ring SYS (30 GB/s measured)" in out
    plan = ("plan", "-np", "2", "--topology", "a=pix4.txt", "--measured", "m.json", "--", "prog")
    status, out, err = ended(capsys, *plan)
    assert status == 0, err
    assert [line.split()[3] for line in out.splitlines()[1:3]] == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gpus", "--topology", "pix4.txt", "-k", "2", "--measured", "none.json"), "none.json cannot be read"),
        (("gpus", "--topology", "pix4.txt", "-k", "2", "--measured", "pix4.txt"), "pix4.txt: it is not from hvdlaunch"),
        (
            ("plan", "-np", "2", "--topology", "b=pix4.txt", "--measured", "m.json", "--", "prog"),
            "--measured: host b has other GPUs than what was measured, a: measure them with hvdlaunch check",
        ),
        (("run", "--nccl-debug", "--restarts", "1", "--", "prog"), "--nccl-debug does not work with --restarts"),
        (("check", "--bandwidth", "--apptainer", "a.sif"), "--bandwidth measures with the project"),
        (("check", "--nccl-debug", "--gpus", "none"), "--nccl-debug logs what --bandwidth starts"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, words, says):
    assert refusal(capsys, *words).startswith(says)
