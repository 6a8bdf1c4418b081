"""Whether a run looks for hosts beside it."""

import threading

import pytest

from launch.errors import LaunchError
from launch.run.supervise import growth
from launch.run.supervise.growth import Growth
from tests.mpi.conftest import wait_until


def test_it_looks_again_until_there_are_hosts(monkeypatch):
    """A look that fails, as with an unreadable hostfile, is one without hosts."""
    answers = iter([LaunchError("no such file"), (), ("h2",)])

    def find():
        answer = next(answers)
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    monkeypatch.setattr(growth, "LOOK_S", 0.0)
    with Growth(find) as beside:
        wait_until(beside.poll, 5)
        assert beside.hosts == ("h2",)
        assert next(answers, None) is None


@pytest.mark.parametrize("is_looking", [True, False])
def test_the_end_of_the_run_ends_a_look(monkeypatch, is_looking):
    ended = threading.Event()
    monkeypatch.setattr(growth, "LOOK_S", 0.0 if is_looking else 60.0)
    monkeypatch.setattr(growth, "stop_asking", ended.set)
    with Growth(lambda: () if ended.wait(5) else ("h2",)) as beside:
        assert not beside.poll()
    assert ended.is_set() == is_looking
