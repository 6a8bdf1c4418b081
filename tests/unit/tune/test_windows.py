import json

import pytest

from launch.tune.windows import COUNTED, WARM_UP, read_windows


def line(**window):
    return json.dumps({"samples": 10, "seconds": 2, **window}) + "\n"


def test_the_warm_up_what_comes_after_and_a_line_that_is_being_written_do_not_count(tmp_path):
    file = tmp_path / "windows.jsonl"
    assert read_windows(file).rates == ()
    file.write_text(line(samples=1) * WARM_UP + line(samples=30) + line()[:9])
    assert read_windows(file).rates == (15,)
    file.write_text(line(samples=1) * WARM_UP + line() * COUNTED + line(samples=1) * 5)
    assert read_windows(file).rates == (5,) * COUNTED
    assert read_windows(file).are_enough


def test_the_last_shares_hold(tmp_path):
    file = tmp_path / "windows.jsonl"
    file.write_text(line() + line(shares={"input": 0.5}) + line(shares={"input": 0.2}, epoch_samples=7) + line())
    found = read_windows(file)
    assert (found.shares, found.epoch_samples) == ({"input": 0.2}, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        "[]\n",
        "{}\n",
        line(samples=0),
        line(samples=1e308, seconds=1e-308),  # a rate that is infinite
        line(samples=1e-320, seconds=1e300),  # a rate of 0
        line(shares=3),
        line(shares={"input": 2}),
    ],
)
def test_nonsense_is_named_with_its_line(tmp_path, wrong):
    file = tmp_path / "windows.jsonl"
    file.write_text(line() + wrong)
    with pytest.raises(ValueError, match="line 2"):
        read_windows(file)
