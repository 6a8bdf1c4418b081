import json

import pytest

from launch.supervise.rank_logs import Report, read_report


@pytest.mark.parametrize("text", [b"{", b"[1, 2]", b"\xff\xfe", b"[" * 200_000])
def test_a_report_that_is_none_says_nothing(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text)
    assert read_report(path) == read_report(tmp_path / "missing") == Report()


def test_a_report_tells_what_the_launcher_must_know(tmp_path):
    path = tmp_path / "report.json"
    known = {"run_folder": "/runs/mine", "saves": "yes", "checkpoint": "40", "exit_reason": "preempted", "said": "bye"}
    path.write_text(json.dumps(known))
    assert read_report(path) == Report(
        run_folder="/runs/mine", saves=True, checkpoint=40, exit_reason="preempted", explanation="bye"
    )
    path.write_text(json.dumps({"saves": "no", "checkpoint": "x", "said": ["bye"], "run_folder": {}, "exit_reason": 1}))
    assert read_report(path) == Report()
