import sys

import pytest

from hvdtrain.settings.safety import calls as recorded
from launch.errors import HostError
from launch.hosts.ssh import Ssh
from launch.placement.slots import place
from launch.process import ask
from launch.run.supervise.rank_logs import Logs
from launch.run.supervise.traces import files
from launch.run.supervise.traces.files import gather_traces, in_calls
from tests.unit.machines import hosts, machine

SLOTS = place(hosts(h1=2, h2=1), {"h1": machine(), "h2": machine()}, np=3, gpus="all", binding="numa")
STACK = """Timeout (0:01:00)!
Thread 0x00007e (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/nn/module.py", line 88 in forward
  File "/home/me/train.py", line 90 in main
  File "/home/me/main.py", line 5 in <module>
"""


class OtherHost(Ssh):
    """A host on which the same folder is another one, and that may be gone."""

    def ask(self, host, words, folder, *, mark, timeout_s):
        assert host == "h2"
        if self.options:
            raise HostError("host h2: gone")
        answer = ask([word.replace("/ranks", "/ranks-of-h2") for word in words], timeout_s=timeout_s)
        return answer.out.removeprefix(mark)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A run whose ranks 0 and 1 are on this host, and rank 2 on another: ranks 0 and 2 wait, and rank 1 hangs."""
    monkeypatch.setattr(files, "is_local", lambda host: host == "h1")
    monkeypatch.setattr(recorded, "_memory", bytearray(len(recorded._memory)))
    monkeypatch.setattr(recorded, "_of_groups", {})
    for name in ("ranks", "ranks-of-h2"):
        (tmp_path / name).mkdir()
    world = recorded.of_group("world")
    with world.record("all-reduce", "gradients"):
        pass
    (tmp_path / "ranks/rank-1.calls").write_bytes(recorded._memory)
    with world.record("all-reduce", "gradients"):
        (tmp_path / "ranks/rank-0.calls").write_bytes(recorded._memory)
        (tmp_path / "ranks-of-h2/rank-2.calls").write_bytes(recorded._memory)
    for file, doing in (("ranks/rank-0", "waiting"), ("ranks/rank-1", "working"), ("ranks-of-h2/rank-2", "waiting")):
        (tmp_path / f"{file}.at").write_text(f"step 57 {doing:<50}\n")
    (tmp_path / "ranks/rank-1.err").write_text(STACK)
    return tmp_path


LATE = "outside of hvdtrain's calls (train.py:90), its last was the gradients, call 1"


@pytest.mark.parametrize(
    ("options", "others", "ranks"),
    [((), "ranks 0, 2 wait in the gradients of step 57, their call 2", [0, 1, 2]),
     (("gone=yes",), "rank 0 waits in the gradients of step 57, its call 2", [0, 1])],
)  # fmt: skip
def test_the_calls_of_all_hosts_are_compared(run_folder, options, others, ranks):
    logs = Logs(folder=run_folder, python=sys.executable, ssh=OtherHost(options=options))
    found = gather_traces(run_folder / "ranks", SLOTS, logs)
    assert sorted(found) == ranks
    assert in_calls(found) == f"rank 1 is {LATE}; {others}"
    assert sorted(gather_traces(run_folder / "ranks", SLOTS, None)) == [0, 1]
