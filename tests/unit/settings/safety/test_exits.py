import faulthandler
import json
import os
import signal
import socket
import sys
import time
from unittest.mock import Mock

import pytest

from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import BadInput, EndOfRun
from tests.unit.run.supervise.test_screen import until


@pytest.fixture(autouse=True)
def hook_is_put_back(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(os, "environ", {})
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


class Left(BaseException):
    """The process has ended by os._exit: not as sys.exit does, by way of MPI_Finalize."""


@pytest.mark.parametrize(("error", "status"), [(ValueError("broken"), 1), (KeyboardInterrupt(), 130)])
def test_a_failing_rank_leaves_at_once_with_its_status(monkeypatch, capsys, error, status):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(os, "environ", {"PMIX_RANK": "5"})
    with pytest.raises(type(error)):
        exits.run(Mock(side_effect=error))
    with pytest.raises(Left) as leaving:
        sys.excepthook(type(error), error, error.__traceback__)
    assert leaving.value.args == (status,)
    stderr = capsys.readouterr().err
    if status == 1:
        assert stderr.startswith(
            f"hvdtrain: error: rank 5 on {socket.gethostname()} failed: ValueError: broken\nTraceback"
        )
        assert stderr.rstrip().endswith("ValueError: broken")
    else:
        assert stderr == ""


@pytest.fixture
def report(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"HVDLAUNCH_REPORT": str(tmp_path / "report.json")})
    return tmp_path / "report.json"


def test_a_report_gathers_facts_and_leaves_nothing_else(report):
    exits.report(run_folder="runs/a")
    assert json.loads(report.read_text()) == {"run_folder": "runs/a"}
    exits.report(said="it's over")
    exits.report(run_folder="runs/b")
    assert json.loads(report.read_text()) == {"run_folder": "runs/b", "said": "it's over"}
    assert list(report.parent.iterdir()) == [report]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("--lr 0\nis wrong"), 2),
        (EndOfRun("--lr 0 is wrong", status=exits.TOO_MANY_SKIPPED, reason="x"), 3),
        (EndOfRun("--lr 0 is wrong", status=exits.REPLICAS_DIFFER, reason="x"), 4),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_bad_input_and_an_agreed_end_have_a_status_and_one_line_that_rank_0_prints_and_reports(
    report, capsys, error, status, rank
):
    os.environ["OMPI_COMM_WORLD_RANK"] = rank
    with pytest.raises(SystemExit) as leaving:
        exits.run(Mock(side_effect=error))
    assert leaving.value.code == status
    line = "hvdtrain: error: --lr 0 is wrong"
    assert capsys.readouterr().err == ("" if rank == "1" else f"{line}\n")
    assert (json.loads(report.read_text()) if report.exists() else {}) == ({} if rank == "1" else {"said": line})


@pytest.mark.parametrize("main", [lambda: None, Mock(side_effect=EndOfRun("saved", status=0, reason="preempted"))])
def test_a_late_request_to_leave_does_not_kill_a_rank_that_has_finished(monkeypatch, main):
    """Python would give the signal back its default before the process has ended."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with pytest.raises(SystemExit) as leaving:
        exits.run(main)
    assert leaving.value.code == 0
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch, tmp_path):
    """As timeout(1) sends it to its program and then to the group; a later one ends the run."""
    handlers, files, ends = {number: signal.getsignal(number) for number in exits.STOP_SIGNALS}, [], []
    monkeypatch.setattr(faulthandler, "enable", lambda file, **_: files.append(file))
    monkeypatch.setattr(exits, "_exit_now", ends.append)
    leave = exits.install_stop_handlers(tmp_path / "rank-0.err", ends.append, step=lambda: None)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            assert leave.wait(10)
        time.sleep(exits._DUPLICATE_S + 0.05)
        assert ends == []
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: ends == ["interrupted", 130])
    finally:
        files[0].close()
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
