from dataclasses import replace
from types import SimpleNamespace

import pytest

from launch.errors import ProcessError
from launch.hosts.host import Host
from launch.machine.topology import Link, Nic, Port
from launch.placement.slots import place
from launch.run.supervise.nccl import run_logged, summary, unexpected_transport, with_log
from launch.run.supervise.traces.nccl_log import read_folder, read_logs, way_of
from tests.unit.machines import linked
from tests.unit.run.supervise.nccl_logs import INFINIBAND, NVLINK, SOCKETS, over_shared_memory, rank_log

NV, SYS = Link(kind="NV", count=1), Link(kind="SYS")
UP, DOWN = (Port(number=1, active=up, ethernet=False) for up in (True, False))


def ring_of_nvlinks(size, *, ports=()):
    """GPUs of which each has an NVLink to the one before and the one behind."""
    odd = {(gpu, (gpu + 1) % size): NV for gpu in range(size)}
    nics = (Nic(name="mlx5_0", links=(SYS,) * size, ports=ports),) if ports else ()
    return replace(linked(size, odd=odd), nics=nics)


def log_of(texts):
    return read_logs({str(rank): text for rank, text in texts.items()}, max_ranks=64)


def evaluate_findings(texts, topologies, **slots):
    hosts = [Host(name=name, slots=count) for name, count in slots.items()]
    placed = place(hosts, topologies, np=sum(slots.values()), gpus="auto", binding="none")
    log = log_of(texts)
    return summary(log, placed), unexpected_transport(log, placed, topologies)


def test_rings_are_followed_from_rank_to_rank():
    size = 40
    ring = [*range(0, size, 2), *range(size - 1, 0, -2)]
    texts = {rank: rank_log(rank, size, [ring], {}) for rank in range(size)}
    assert (log_of(texts).rings, log_of(texts).channels) == ((tuple(ring),), 1)
    del texts[7]
    assert (log_of(texts).rings, log_of(texts).missing) == ((), (7,))


@pytest.mark.parametrize(
    ("via", "way"),
    [
        ("P2P/CUMEM/read", "P2P/CUMEM"),
        ("SHM/direct/direct", "SHM"),
        ("SHM/direct", "SHM"),  # from NCCL 2.30 on
        ("NET/IB/3/GDRDMA/Shared", "NET/IB/GDRDMA"),
        ("NET/IB/3(2)/GDRDMA(PCI)/Shared", "NET/IB/GDRDMA(PCI)"),
        ("P2P/direct pointer", "P2P/direct pointer"),
    ],
)
def test_ways_without_what_differs_between_alike_ones(via, way):
    line = f"h1:1:2 [0] NCCL INFO Channel 04/1 : 0[d6000] -> 1[1] [send] via {via}"
    log = log_of({0: f"h1:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 1\n{line}\n"})
    assert log.ways == {(0, 1): way}
    assert way_of(via) == way
    assert summary(log, []) == "NCCL of unknown version: no channel logged"


def test_two_hosts_over_infiniband_and_over_tcp():
    topologies = {name: ring_of_nvlinks(2, ports=(UP,)) for name in ("h1", "h2")}
    said, wrong = evaluate_findings(INFINIBAND, topologies, h1=2, h2=2)
    assert "P2P/IPC on a host, NET/IB/GDRDMA between hosts" in said
    assert wrong == []
    said, wrong = evaluate_findings(SOCKETS, topologies, h1=2, h2=2)
    assert "NET/Socket between hosts" in said
    assert [(one.hosts, one.problem) for one in wrong] == [(("h1",), "it talks to h2 over TCP though mlx5_0:1 is up")]
    down = {name: ring_of_nvlinks(2, ports=(DOWN,)) for name in ("h1", "h2")}
    assert evaluate_findings(SOCKETS, down, h1=2, h2=2)[1] == []


def test_shared_memory_where_nvlink_is_there():
    texts = over_shared_memory(NVLINK)
    _, wrong = evaluate_findings(texts, {"h1": ring_of_nvlinks(4)}, h1=4)
    assert {one.problem for one in wrong} == {
        f"GPUs {a} and {b} (NV1) talk over SHM, not P2P" for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))
    }
    assert evaluate_findings(texts, {"h1": linked(4)}, h1=4)[1] == []


def test_smaller_communicators_do_not_count():
    across = {rank: rank_log(0, 2, [[0, 1]], {1: "via NET/IB/0"}) for rank in range(4)}
    assert log_of({rank: across[rank] + NVLINK[rank] + across[rank] for rank in range(4)}) == log_of(NVLINK)


def test_warnings_and_ranks_without_a_log():
    texts = {0: rank_log(0, 2, [[0, 1]], {}, warn="NET/IB : Got async event : port error")}
    _, wrong = evaluate_findings(texts, {"h1": ring_of_nvlinks(2)}, h1=2)
    assert [one.problem for one in wrong] == [
        "NCCL warned on rank 0: NET/IB : Got async event : port error (transport/net_ib.cc:93)",
        "no NCCL log from rank 1",
    ]


def test_the_most_frequent_kinds_of_warnings_are_one_line_each(tmp_path):
    for rank in range(4):
        kinds = ["peer 10.0.0.{0}<4{0}> is gone"] * 3 + [word * (rank % 2 + 1) for word in ("a ", "b ", "c ", "d ")]
        text = "".join(rank_log(rank, 4, [], {}, warn=kind.format(rank)) for kind in kinds)
        (tmp_path / f"nccl.node.{rank}.log").write_text(text if rank != 2 else text.replace("10.0", "fe80::10.0"))
    log = read_folder(tmp_path, max_ranks=4)
    placed = place([Host(name="h1", slots=4)], {"h1": ring_of_nvlinks(4)}, np=4, gpus="auto", binding="none")
    wrong = unexpected_transport(log, placed, {"h1": ring_of_nvlinks(4)})
    assert len(wrong) == 5
    assert str(wrong[0]) == (
        "warning: h1: NCCL warned 12 times, first on rank 0: peer 10.0.0.0<40> is gone (transport/net_ib.cc:93). "
        "See nccl.node.0.log."
    )
    assert wrong[1].problem.startswith("NCCL warned 2 times, first on rank 0: a")


def test_logs_are_read_from_a_folder(tmp_path):
    assert read_folder(tmp_path, max_ranks=4) is None
    for rank, text in NVLINK.items():
        (tmp_path / f"nccl.node.{4000 + rank}.log").write_text(text)
    (tmp_path / "nccl.node.1.log").write_bytes(b"\xff\xfe")
    (tmp_path / "nccl.node.2.log").write_text(NVLINK[3].replace("nranks 4", "nranks 999999999999"))
    assert read_folder(tmp_path, max_ranks=4) == log_of(NVLINK)


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """A run of the job `mine`, whose ranks log nothing."""
    monkeypatch.setattr("launch.run.supervise.nccl.run", lambda *_, **__: None)
    environment = with_log({"HVDLAUNCH_JOB": "mine"}, tmp_path)
    return SimpleNamespace(environment=environment, plan=SimpleNamespace(slots=range(4)))


def test_the_logs_of_an_earlier_run_of_that_job_are_not_read(prepared, tmp_path):
    folder = tmp_path / "logs/mine"
    run_logged(prepared)
    assert [one.stat().st_mode & 0o777 for one in (folder.parent, folder)] == [0o700, 0o700]
    (folder / "nccl.node.4000.log").write_text(NVLINK[0])
    (folder / "rank-0.log").touch()
    assert run_logged(prepared)[1] is None
    assert [file.name for file in folder.iterdir()] == ["rank-0.log"]


def test_no_link_is_followed_to_another_folder(prepared, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "mine").mkdir(parents=True)
    (tmp_path / "logs").symlink_to(elsewhere)
    with pytest.raises(ProcessError, match="logs/mine cannot be made"):
        run_logged(prepared)
    assert [file.name for file in elsewhere.iterdir()] == ["mine"]


def test_what_makes_nccl_write_it(tmp_path):
    mine = {"HVDLAUNCH_JOB": "mine"}
    plain = {**mine, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{tmp_path}/logs/mine/nccl.%h.%p.log"}
    assert with_log(mine, tmp_path) == {**plain, "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV"}
    own = {"NCCL_DEBUG_SUBSYS": "ALL"}
    assert with_log({**mine, **own}, tmp_path) == {**plain, **own}
