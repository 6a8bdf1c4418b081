"""Which hosts are slow, on planted figures, and what is measured where."""

import json
from dataclasses import replace

import pytest
import torch

from hvdtrain import speed as measured_speed
from launch.advice.study import speed
from launch.advice.study.speed import MARK, NO_SPEEDS, Speed, Speeds, measure_speeds, slow_devices
from launch.errors import HostError
from launch.hosts.host_facts import HostFacts
from launch.hosts.ssh import Ssh
from tests.unit.machines import SOFTWARE, condition, facts_of, machine, request

H100 = {"name": "H100", "tflops": 700.0, "gb_per_s": 2900.0}
CORES = {"name": "32 cores, EPYC", "tflops": 1.0, "gb_per_s": 100.0}
OF_GPU = "look at `nvidia-smi -q -d PERFORMANCE` there, at its slot, power and air, or leave it out with --gpus"
OF_CORES = "see what else runs there (top), its clock and its cooling, or leave the host out"


def planted(usual, *others, gpus=4):
    """Two hosts with these devices, all as usual but those in `others`: (host, device, what is different)."""
    hosts = {host: [usual] * (gpus or 1) for host in ("h1", "h2")}
    for host, place, different in others:
        hosts[host] = [{**one, **different} if number == place else one for number, one in enumerate(hosts[host])]
    return Speeds(
        hosts={host: tuple(Speed(**one) for one in own) for host, own in hosts.items()},
        gpus={host: list(range(gpus)) for host in hosts},
    )


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        (planted(H100), []),
        (planted(H100, ("h2", 1, {"tflops": 631.0}), ("h1", 1, {"gb_per_s": 2611.0})), []),
        (
            planted(H100, ("h2", 1, {"tflops": 629.0}), ("h2", 3, {"tflops": 300.0}), ("h1", 0, {"gb_per_s": 2609.0})),
            [
                f"h2: slow matrix product: GPU 1 629, GPU 3 300 TFLOP/s, the median of its peers is 700: {OF_GPU}",
                f"h1: slow memory copy: GPU 0 2,609 GB/s, the median of its peers is 2,900: {OF_GPU}",
            ],
        ),
        (planted(H100, *(("h1", place, {"name": "V100", "tflops": 90.0, "gb_per_s": 700.0}) for place in (0, 1))), []),
        (planted(CORES, ("h2", 0, {"tflops": 0.91}), gpus=0), []),
        (
            planted(CORES, ("h2", 0, {"tflops": 0.89}), gpus=0),
            [f"h2: slow matrix product: its cores 0.89 TFLOP/s, the median of its peers is 1: {OF_CORES}"],
        ),
    ],
)
def test_who_is_more_than_10_percent_below_its_peers_is_named(speeds, found):
    assert facts_of(slow_devices(speeds)) == [f"warning: {line}" for line in found]


def test_a_host_that_is_slow_as_a_whole_is_named_and_the_others_are_not():
    speeds = planted(H100, *(("h2", place, {"tflops": 500.0}) for place in range(4)))
    [finding] = slow_devices(speeds)
    assert finding.hosts == ("h2",)
    assert speeds.lines() == ["H100: 600 TFLOP/s, 2,900 GB/s, the median of 8"]


@pytest.fixture
def world(monkeypatch):
    """Three hosts with GPUs, whose programs answer as the test says: {host: what it prints}."""
    printed, asked = {}, {}

    def ask(_, host, words, folder, *, mark, timeout_s):
        assert (mark, folder, words[1:5]) == (MARK, "/shared", ["-P", "-m", "hvdtrain.speed", "3"])
        asked[host] = words[5:]
        if isinstance(answer := printed[host], HostError):
            raise answer
        return answer if isinstance(answer, str) else json.dumps(answer)

    monkeypatch.setattr(Ssh, "ask", ask)
    monkeypatch.setattr(speed, "is_local", lambda _: False)
    facts = {f"h{n}": HostFacts(host=f"h{n}", hostname="x", topology=machine(2), condition=condition()) for n in (1, 2)}
    return facts, printed, asked


def test_the_free_gpus_of_all_hosts_are_measured_and_a_host_that_fails_is_a_finding(world):
    facts, printed, asked = world
    facts["h3"] = replace(facts["h1"], topology=machine(3, unusable={0: "busy: pid 7"}))
    facts["h4"] = replace(facts["h1"], condition=condition(software=replace(SOFTWARE, project=None)))
    facts["h5"] = replace(facts["h1"], topology=machine(1, unusable={0: "busy: pid 7"}))
    printed |= {"h1": [H100, H100], "h2": HostError("host h2: it is broken"), "h3": [H100]}
    speeds, findings = measure_speeds(request(gpus=(0, 1)), facts, "/shared")
    assert asked == {"h1": ["GPU-0000,GPU-1111"], "h2": ["GPU-0000,GPU-1111"], "h3": ["GPU-1111"]}
    assert (speeds.hosts["h3"], speeds.gpus) == ((Speed(**H100),), {"h1": [0, 1], "h3": [1]})
    again = "try `python -m hvdtrain.speed 3 GPU-0000,GPU-1111` there"
    assert facts_of(findings) == [f"warning: h2: not measured: it is broken: {again}"]


@pytest.mark.parametrize("answer", ["", "[", "[3]", [H100, H100], [{**CORES, "tflops": "much"}]])
def test_cores_are_measured_without_gpus_and_a_strange_answer_is_a_finding(world, answer):
    facts, printed, asked = world
    printed |= {"h1": [CORES], "h2": answer}
    facts = {host: replace(own, topology=machine(0)) for host, own in facts.items()}
    speeds, [finding] = measure_speeds(request(), facts, "/shared")
    assert (asked, list(speeds.hosts), finding.hosts) == ({"h1": [], "h2": []}, ["h1"], ("h2",))


def test_one_device_has_no_peer_and_an_image_has_its_own_torch(world):
    facts, _, asked = world
    alone = {"h1": replace(facts["h1"], topology=machine(1))}
    assert measure_speeds(request(), alone, "/shared") == (NO_SPEEDS, [])
    assert measure_speeds(request(apptainer="a.sif"), facts, "/shared") == (NO_SPEEDS, [])
    assert asked == {}


def test_what_hvdtrain_prints_is_what_check_reads(world, monkeypatch, capsys):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    try:
        measured_speed.main("0.01")
    finally:
        torch.set_num_threads(threads)
    facts, printed, _ = world
    printed["h1"] = printed["h2"] = capsys.readouterr().out.removeprefix(measured_speed.MARK)
    facts = {host: replace(own, topology=machine(0)) for host, own in facts.items()}
    speeds, findings = measure_speeds(request(), facts, "/shared")
    [[own], _] = speeds.hosts.values()
    assert findings == []
    assert 1e-4 < own.tflops < 100
    assert 0.01 < own.gb_per_s < 10_000
    assert " cores, " in own.name
