import json
from types import SimpleNamespace

import pytest

from launch.run.supervise import after_checkpoint
from launch.run.supervise.after_checkpoint import AfterCheckpoint

HERE = {"slots": [SimpleNamespace(host="h1")], "local": ("h1",)}


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run with a command: what it is told of checkpoints, and the lines that it shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(after_checkpoint, "POLL_S", 0.0)
    lines = []

    def begin(command):
        plan = SimpleNamespace(request=SimpleNamespace(after_checkpoint=command), **HERE)
        commands = AfterCheckpoint(
            SimpleNamespace(plan=plan, launcher=None),
            tmp_path / "report",
            SimpleNamespace(say=lambda line: lines.append(f"hvdlaunch: {line}\n".encode())),
        )

        def saved(step):
            (tmp_path / "report").write_text(json.dumps({"run_folder": "runs/r", "checkpoint": str(step)}))
            commands.poll()

        return commands, saved, lines

    return begin


def test_one_command_at_a_time_gets_the_newest_folder_and_training_does_not_wait(begun, tmp_path):
    commands, saved, lines = begun('echo "$HVDLAUNCH_CHECKPOINT" >>seen; while [ ! -e go ]; do sleep 0.05; done')
    for step in (5, 10, 15, 15):
        saved(step)
    (tmp_path / "go").touch()
    commands.finish(lambda: False)
    folders = [f"{tmp_path}/runs/r/checkpoints/step-{step:09d}" for step in (5, 15)]
    assert ((tmp_path / "seen").read_text().splitlines(), lines) == (folders, [])


def test_a_failure_is_one_line_and_what_still_runs_ends_with_the_run(begun, tmp_path):
    commands, saved, lines = begun("[ -e seen ] && exec sleep 300; touch seen; exit 3")
    saved(5)
    commands.finish(lambda: False)
    saved(10)
    commands.finish(lambda: True)
    commands.end()
    of = f"{tmp_path}/runs/r/checkpoints/step-"
    texts = [
        f"status 3 for {of}000000005; the training continues.",
        f"stopped at {of}000000010. Run it again for this folder.",
    ]
    assert lines == [f"hvdlaunch: warning: --after-checkpoint: {text}\n".encode() for text in texts]
    assert commands._running.status() == -9
