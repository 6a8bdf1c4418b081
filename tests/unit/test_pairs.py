import argparse
import json

import pytest

from bench import jobs, pairs, run


def test_variants_run_in_turns_forwards_and_backwards():
    asked = []
    variants = {name: lambda name=name: asked.append(name) or len(asked) for name in "abc"}
    measured = pairs.in_turns(variants, 3)
    assert "".join(asked) == "abccbaabc"
    assert measured == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_ratio_is_taken_within_rounds():
    """On a machine that is ten times as slow in every other round."""
    slow_s = [1.0, 10.0, 1.0, 10.0, 1.0]
    found = pairs.ratio([2 * one for one in slow_s], slow_s)
    assert found == pairs.Ratio(median=2.0, low=2.0, high=2.0, n=5)
    with pytest.raises(ValueError, match="zip"):
        pairs.ratio([1.0, 2.0], [1.0])


def test_a_table_is_json_beside_markdown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pairs, "RESULTS", tmp_path / "build" / "bench")
    monkeypatch.setattr(pairs, "machine", lambda: {"CPU": "2 cores"})
    table = pairs.Table(name="step", question="How fast?", columns=["side", "against"], about={"rounds": 3})
    table.add("ours", pairs.Ratio(median=1.25, low=1.0, high=1.5, n=3))
    assert "against: 1.25 (1 to 1.5, n = 3)" in capsys.readouterr().out  # at once
    table.add("theirs", None)
    table.write()
    lines = (tmp_path / "build" / "bench" / "step.md").read_text().splitlines()
    assert [" ".join(line.split()) for line in lines if not line.startswith("| --")] == [
        *("How fast?", "", "| side | against |", "| ours | 1.25 (1 to 1.5, n = 3) |", "| theirs | - |"),
        *("", "CPU 2 cores, rounds 3"),
    ]
    written = json.loads((tmp_path / "build" / "bench" / "step.json").read_text())
    assert written["about"] == {"rounds": 3}
    assert written["rows"][0]["against"] == {"median": 1.25, "low": 1.0, "high": 1.5, "n": 3}


def test_a_job_that_fails_ends_the_case_with_its_words():
    with pytest.raises(SystemExit, match=r"no attribute 'none'[\s\S]*jobs:none .*exit status 1"):
        jobs.job([], "jobs:none")


def test_an_option_has_the_type_of_its_default_and_its_choices(capsys):
    parser = argparse.ArgumentParser()
    for name, default in {"np": [1, 2], "rate": 0.5, "compile": False, "ways": (["a"], ["a", "b"])}.items():
        run.add_option(parser, f"--{name}", default)
    chosen = parser.parse_args(["--np", "3", "4", "--rate", "2", "--ways", "a", "b"])
    assert vars(chosen) == {"np": [3, 4], "rate": 2.0, "compile": False, "ways": ["a", "b"]}
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--ways", "c"])
    assert "choose from" in capsys.readouterr().err
