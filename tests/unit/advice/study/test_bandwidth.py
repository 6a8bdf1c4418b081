"""check --bandwidth without ranks: what they would leave is written in their place."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.advice.study import bandwidth, check
from launch.errors import PlacementError
from launch.hosts.host import Host
from launch.hosts.host_facts import HostFacts
from launch.placement.measured import read
from launch.placement.slots import place
from launch.placement.traffic import PartTraffic, Traffic
from launch.run.supervise.run import RunResult
from tests.unit.machines import facts_of, hosts, machine, request
from tests.unit.run.supervise.nccl_logs import NVLINK, over_shared_memory

ENDED = RunResult(status=0, run_folder=None, why=None, stopped=False)
SIZES = (2**10, 2**24)


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Jobs that end as the test says; their ranks would exchange at 1 GB/s between hosts and 20 between GPUs."""
    monkeypatch.chdir(tmp_path)
    started = []
    said = SimpleNamespace(started=started, result=ENDED, slow={}, report=lambda _: True, logs={}, sum_s=lambda _: 1.0)

    def prepare(asked, environment, folder, known):
        topologies = {host.name: known[host.name].topology for host in asked.hosts}
        gpus = "none" if not any(one.gpus for one in topologies.values()) else asked.gpus
        slots = place(asked.hosts, topologies, np=asked.np, gpus=gpus, binding="none")
        plan = SimpleNamespace(slots=slots, topologies=topologies)
        started.append((asked, environment))
        return SimpleNamespace(plan=plan, environment=environment, program=asked.program)

    def run(prepared, *, out, grace_s=0):
        assert out == 2  # standard output is for what check prints
        slots, file = prepared.plan.slots, Path(prepared.program[-1])
        places = list(dict.fromkeys(slot.host for slot in slots))
        several = len(places) > 1
        ends = [next(s.rank for s in slots if s.host == host) for host in places] if several else range(len(slots))
        lines = [
            {"ranks": pair, "bytes": size, "median_s": size / rate / 1e9, "gb_per_s": rate}
            for pair in combinations(ends, 2)
            for size in SIZES
            for rate in [said.slow.get(tuple(slots[rank].host if several else slots[rank].gpu for rank in pair), 20)]
        ]
        took_s = [said.sum_s(prepared.environment)] * 3
        sums = [{"bytes": size, "median_s": size / 9e9, "bus_gb_per_s": 9.0, "times_s": took_s} for size in SIZES]
        if said.report(prepared.environment):
            file.write_text(json.dumps({"measured": sums, "pairs": lines if "--pairs" in prepared.program else []}))
        for rank, text in said.logs.items():
            (Path(prepared.environment["NCCL_DEBUG_FILE"]).parent / f"nccl.node.{rank}.log").write_text(text)
        return said.result

    monkeypatch.setattr(bandwidth, "prepare", prepare)
    monkeypatch.setattr(bandwidth, "run", run)
    monkeypatch.setattr("launch.run.supervise.nccl.run", run)
    return said


def checked(names, *, gpus=4):
    facts = {name: HostFacts(host=name, hostname=name, topology=machine(gpus)) for name in names}
    return check.Checked(hosts=facts, shared=None, findings=())


def measured(names, *, slots=4, gpus=4, nccl_debug=False, **changes):
    asked = request(hosts=hosts(**dict.fromkeys(names, slots)), **changes)
    environment = {"PATH": "/bin", "HVDLAUNCH_JOB": "mine"}
    return bandwidth.with_bandwidth(checked(names, gpus=gpus), asked, environment, nccl_debug=nccl_debug)


def test_each_host_then_all_and_the_file_is_what_the_choice_reads(world, capsys):
    world.slow = {(0, 2): 4.0}  # on both hosts, and alike links are faster
    found = measured(["h1", "h2"])
    assert [[host.name for host in asked.hosts] for asked, _ in world.started] == [["h1"], ["h2"], ["h1", "h2"]]
    assert [asked.np for asked, _ in world.started] == [4, 4, 8]
    told = "hvdlaunch: measuring h2 (2 of 3)\nhvdlaunch: measuring 2 hosts (3 of 3)\n"
    assert capsys.readouterr().err.partition("\n")[2] == told
    assert not any(asked.check for asked, _ in world.started)
    assert {own["MPIEXEC_TIMEOUT"] for _, own in world.started} == {"305", "310"}
    assert [own["HVDLAUNCH_JOB"] for _, own in world.started] == ["mine-h1", "mine-h2", "mine-all"]
    assert [(one.hosts, one.problem) for one in found.findings] == [
        (("h1", "h2"), "GPUs 0 and 2 exchange 16MB at 4 GB/s, links of the same kind (PIX) 20")
    ]
    assert found.status == 0
    document = check.to_json(found)
    one, two = read(document, name="f.json").links
    assert (one.host, two.host, one.gb_per_s[0][2], one.gb_per_s[0][1]) == ("h1", "h2", 4.0, 20.0)
    shown = check.text(found)
    assert "on h1 " in shown
    assert "h1 and h2 " in shown
    assert not list(Path.cwd().iterdir())


def test_a_job_that_fails_is_an_error_and_the_others_go_on(world):
    world.result = replace(ENDED, status=3, why="rank 1 on h1 ended with status 3")
    found = measured(["h1"])
    assert facts_of(found.findings) == ["error: h1: it was not measured: rank 1 on h1 ended with status 3: see above"]
    assert found.status == 1
    world.result, world.report = ENDED, lambda _: False
    found = measured(["h1", "h2"])
    assert facts_of(found.findings) == [
        "error: h1, h2: it was not measured: its ranks have left no report: start in a folder that all hosts share"
    ]
    assert len(world.started) == 4


def test_a_job_that_cannot_be_started_is_an_error_and_the_others_go_on(world, monkeypatch):
    def refused(asked, *rest, prepare=bandwidth.prepare):
        if asked.hosts[0].name == "h1":
            raise PlacementError("-np 4 is more than there is: give more")
        return prepare(asked, *rest)

    monkeypatch.setattr(bandwidth, "prepare", refused)
    found = measured(["h1", "h2"])
    assert facts_of(found.findings) == ["error: h1, h2: -np 4 is more than there is: give more"]
    assert list(found.bandwidth.hosts) == ["h2"]
    assert check.text(found).splitlines()[-1] == "2 hosts: 1 error"
    assert not list(Path.cwd().iterdir())


def test_a_host_without_a_free_gpu_is_told(world):
    facts = checked(["h1", "h2"])
    busy = machine(unusable=dict.fromkeys(range(4), "busy: 1 GiB used"))
    facts = replace(facts, hosts={**facts.hosts, "h2": replace(facts.hosts["h2"], topology=busy)})
    asked = request(np=None, hosts=(Host(name="h1", slots=1, counted=False), Host(name="h2", slots=1, counted=False)))
    found = bandwidth.with_bandwidth(facts, asked, {}, nccl_debug=False)
    skipped = "warning: h2: it was not measured: none of its GPUs is free: free some, or leave the host out"
    assert skipped in facts_of(found.findings)
    assert list(found.bandwidth.hosts) == ["h1"]


def test_a_signal_ends_it(world):
    world.result = replace(ENDED, status=143, stopped=True)
    with pytest.raises(SystemExit) as left:
        measured(["h1", "h2"])
    assert left.value.code == 143
    assert not list(Path.cwd().iterdir())


def test_nothing_is_started_where_a_host_has_an_error_or_has_no_other(world):
    error = bandwidth.Finding(severity="error", hosts=("h1",), about="x", problem="y", remedy="z")
    bad = replace(checked(["h1"]), findings=(error,))
    found = bandwidth.with_bandwidth(bad, request(hosts=hosts(h1=4)), {}, nccl_debug=False)
    assert facts_of(found.findings)[1:] == ["warning: h1: it was not measured: fix the errors first"]
    alone = measured(["h1"], slots=1)
    assert facts_of(alone.findings) == [
        "error: h1: it was not measured: one rank has no other to sum with: pass its slots, such as -H localhost:2"
    ]
    assert check.text(alone).splitlines()[-1] == "1 host: 1 error"
    assert world.started == []


def test_nccls_log_is_kept_and_read(world):
    world.logs = over_shared_memory(NVLINK)
    found = measured(["h1"], nccl_debug=True)
    _, environment = world.started[0]
    folder = Path(environment["NCCL_DEBUG_FILE"]).parent
    assert folder == Path.cwd() / "logs" / environment["HVDLAUNCH_JOB"]
    assert len(list(folder.iterdir())) == 4
    assert {one.about for one in found.findings} == {"NCCL"}
    assert "GPUs 0 and 2 (PIX) talk over SHM, not P2P" in {one.problem for one in found.findings}
    line = f"h1: NCCL 2.21.5+cuda12.4: 2 channels, SHM on a host, ring 0-1-2-3; its logs are in {folder}"
    assert line in check.text(found)


def test_with_traffic_ways_to_sum_its_gradients_are_compared_over_all_hosts(world):
    part = PartTraffic(exchanges=(), sums_bytes=0, gradient_bytes=4_000_003)
    world.sum_s = lambda own: 0.5 if own.get("OMPI_MCA_coll_tuned_allreduce_algorithm") == "4" else 1.0
    found = measured(["h1", "h2"], slots=2, gpus=0, traffic=Traffic(parts=(part,)))
    jobs_of_sums = [asked for asked, own in world.started if own["HVDLAUNCH_JOB"] == "mine-sums"]
    assert {asked.np for asked in jobs_of_sums} == {4}
    assert all("4000000" in asked.program for asked in jobs_of_sums)
    assert ["--pairs" in asked.program for asked, _ in world.started[:3]] == [False, False, True]
    assert (found.bandwidth.links, list(found.bandwidth.pairs)) == ({}, [("h1", "h2")])  # a host has no links of CPUs
    sums = found.bandwidth.sums
    assert (sums.hosts, sums.ranks, sums.on_gpus) == (("h1", "h2"), (2, 2), False)
    assert "sums of 4 MB go fastest by ring, 2.00 times as fast as the default" in check.text(found)
    assert read(check.to_json(found), name="f.json").sums == sums
    assert not list(Path.cwd().iterdir())


def test_a_way_that_cannot_be_measured_is_a_warning(world):
    part = PartTraffic(exchanges=(), sums_bytes=0, gradient_bytes=4096)
    world.report = lambda own: own.get("NCCL_ALGO") != "Tree"
    found = measured(["h1"], traffic=Traffic(parts=(part,)))
    assert [way.name for way in found.bandwidth.sums.ways] == ["the default", "ring"]
    assert [one.problem for one in found.findings] == ["it was not measured: sums by tree"]
    assert "none is set" in check.text(found)
