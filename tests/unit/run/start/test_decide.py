"""What is decided needs nothing but what it is given."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from launch.errors import HostError, LaunchError, PlacementError, TopologyError
from launch.hosts.host_facts import HostFacts, facts_from_json, facts_to_json, version
from launch.machine.condition import Setting
from launch.machine.topology import Interface
from launch.placement.measured import GpuLinks, Measured
from launch.run.start import decide as deciding
from launch.run.start.facts import Facts
from launch.run.start.prepare import shared_network
from launch.run.start.render import render
from launch.run.start.shown import plan_text
from tests.unit.machines import SOFTWARE, condition, hosts, machine, request
from tests.unit.mutated import mutated
from tests.unit.run.start.specs import launcher


def facts(**changes):
    cidrs = {"h1": "10.0.0.1/24", "h2": "10.0.0.2/24"}
    answers = {
        host: HostFacts(host=host, hostname=host, topology=machine(interfaces=[("eth0", cidr)]), address=None)
        for host, cidr in cidrs.items()
    }
    plain = Facts(
        hosts=hosts(h1=2, h2=2),
        answers=answers,
        local=frozenset({"h1"}),
        launcher=launcher(kind="horovodrun"),
        interfaces=(Interface(name="eth0", cidr="10.0.0.1/24"),),
        own_addresses={},
        programs={"prog": "/env/bin/prog"},
    )
    return replace(plain, **changes)


def decide(asked, known, environment):
    """With the network that these hosts share, if nobody tries any."""
    where = {"local": known.local, "own_addresses": known.own_addresses}
    used = {host: known.answers[host] for host in deciding.allot(asked, known)[1]}
    shared = shared_network(used, asked, {"NCCL_SOCKET_IFNAME": "eth0"}, Path.cwd(), **where)
    return deciding.decide(asked, known, shared, environment, job="mine")


def decided(environment=None, **changes):
    return decide(request(np=4), facts(**changes), environment or {"PATH": "/bin"})


def test_only_hosts_that_get_ranks_must_have_been_measured():
    rows = tuple(tuple(None if a == b else 10.0 for b in range(4)) for a in range(4))
    mine = GpuLinks(host="h1", gpus=(0, 1, 2, 3), uuids=(None,) * 4, gb_per_s=rows)
    one = decide(request(np=2, measured=Measured(links=(mine,))), facts(), {"PATH": "/bin"})
    assert {slot.host for slot in one.slots} == {"h1"}
    with pytest.raises(TopologyError, match="host h2 has other GPUs than what was measured"):
        decide(request(np=4, measured=Measured(links=(mine,))), facts(), {"PATH": "/bin"})


def with_conditions(**odd):
    answers = facts().answers
    return {host: replace(own, condition=odd.get(host, condition())) for host, own in answers.items()}


def test_what_would_end_a_run_on_several_hosts_ends_it_before_it_starts_with_all_that_was_found():
    other = condition(software=replace(SOFTWARE, torch="2.10.0", cuda="12.8"), shm_free_mib=1)
    with pytest.raises(HostError) as refused:
        decided(answers=with_conditions(h2=other))
    assert str(refused.value).startswith("this run would fail because of h2: fix what follows, or pass --no-check")
    assert [line.split(": ")[:2] for line in refused.value.details] == [["error", "h2"]] * 2 + [["warning", "h2"]]
    started = decide(request(np=4, check=False), facts(answers=with_conditions(h2=other)), {})
    assert not [remark for remark in started.remarks if "h2" in remark]


def test_warnings_are_remarks_and_hosts_without_ranks_do_not_count():
    few = condition(shm_free_mib=100)
    (remark,) = [one for one in decided(answers=with_conditions(h2=few)).remarks if one.startswith("warning: ")]
    assert remark.startswith("warning: h2: /dev/shm has 100 MiB free, its ranks need 128. ")
    assert decide(request(np=2), facts(answers=with_conditions(h2=few)), {}).remarks == ()
    assert decided(answers=with_conditions()).remarks == ()


def test_variables_that_every_rank_gets_are_none_that_differ():
    own = condition(settings=(Setting(name="NCCL_DEBUG", value="1", source="its environment"),))
    (remark,) = decided(answers=with_conditions(h2=own)).remarks
    assert "NCCL_DEBUG is '1', on h1 not set" in remark
    assert decided({"NCCL_DEBUG": "INFO"}, answers=with_conditions(h2=own)).remarks == ()


def test_no_report_of_a_host_leads_to_more_than_one_line():
    """Whatever a broken, older or hostile host says, and is believed."""
    few = machine(2, interfaces=[("eth0", "10.0.0.2/24")], cores=(0, 8))
    own = replace(facts().answers["h2"], address="10.0.0.2", topology=few, condition=condition())
    lines, planned, ours = {}, 0, version()
    for where, report in islice(mutated(json.loads(facts_to_json(own))), None, None, 3):  # of each value some places
        try:
            answer = facts_from_json(json.dumps(report), "h2", ours)
            known = facts(answers={**facts().answers, "h2": answer}, own_addresses={"h2": "10.0.0.1"})
            text = plan_text(render(decide(request(np=4), known, {}), launcher()))
        except LaunchError as error:
            lines[where] = (type(error), str(error))
        else:
            assert all(line.isprintable() for line in text.splitlines()), where
            planned += 1
    assert {where for where, (_, line) in lines.items() if "h2" not in line or not line.isprintable()} == set()
    assert {HostError, PlacementError} <= {kind for kind, _ in lines.values()}
    assert min(len(lines), planned) > 50
