import pytest

from bench import jobs, pairs


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


def test_a_job_that_fails_ends_the_case_with_its_words():
    with pytest.raises(SystemExit, match=r"no attribute 'none'[\s\S]*jobs:none .*exit status 1"):
        jobs.job([], "jobs:none")
