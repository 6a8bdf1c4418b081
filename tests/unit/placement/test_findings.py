"""Each fault that a run on several hosts looks for, planted on one of three hosts with nothing else wrong."""

from dataclasses import replace

import pytest

from launch.errors import HostError
from launch.hosts.host_facts import HostFacts
from launch.machine.condition import Setting
from launch.machine.topology import Interface
from launch.placement import findings
from launch.placement.findings import common_findings, folder_findings, from_error
from launch.placement.network import SharedNetwork
from tests.unit.machines import SOFTWARE, condition, facts_of, machine, with_ports

HOSTS = ("h1", "h2", "h3")


def three(**odd):
    """Facts of three hosts; the condition of those that are named is another one."""
    conditions = dict.fromkeys(HOSTS, condition()) | odd
    return {h: HostFacts(host=h, hostname=h, topology=machine(), condition=own) for h, own in conditions.items()}


def network(**odd):
    usual = {"mtu": 1500, "speed_mbps": 25_000}
    nics = {f"h{i}": {"name": f"eth{i}", "cidr": f"10.0.0.{i}/24", **usual} | odd.get(f"h{i}", {}) for i in (1, 2, 3)}
    return SharedNetwork(name="10.0.0.0/24", interfaces={host: Interface(**nic) for host, nic in nics.items()})


def found(facts, *, shared=None, ranks=None, given=(), software=True):
    shared = shared or network()
    return facts_of(common_findings(facts, shared=shared, ranks=ranks or {}, exports=given, software=software))


def with_software(**changes):
    return condition(software=replace(SOFTWARE, **changes))


FOLDERS = condition().folders


def with_folder(place, **changes):
    return condition(folders=tuple(replace(own, **changes) if own is FOLDERS[place] else own for own in FOLDERS))


def test_of_hosts_with_nothing_wrong_nothing_is_said():
    assert found(three()) == []
    unasked = {host: replace(own, condition=None) for host, own in three().items()}
    assert found(unasked) == []


def test_each_version_that_is_not_that_of_most_hosts_is_an_error_with_host_and_field():
    other = three(h2=with_software(**{name.lower(): "9.9" for name in findings.REMEDIES}))
    for line, (name, remedy) in zip(found(other), findings.REMEDIES.items(), strict=True):
        usual = getattr(SOFTWARE, name.lower())
        assert line == f"error: h2: {name} 9.9, on h1, h3 {usual}: {remedy.format(usual=usual)}"
    assert found(other, software=False) == []
    (line,) = found(three(h2=with_software(torch=None)))
    assert line.startswith("error: h2: torch none, on h1, h3 2.11.0: run `make setup`")
    alone = with_software(project=None)
    facts = three(h1=alone, h2=with_software(project=None, torch=None), h3=alone)
    assert found(facts) == ["error: h2: torch none, on h1, h3 2.11.0: install the same version there"]


def test_ranks_on_cpus_need_no_driver():
    facts = three(h2=with_software(driver=None))
    facts["h2"] = replace(facts["h2"], topology=machine(0))
    assert found(facts) == []


def test_other_code_is_an_error_and_another_commit_of_the_same_code_a_warning():
    usual = "0.1.0 commit 012345678 code c0de"
    mend = "`git checkout 0123456789ab` there, without changes of its own"
    assert found(three(h3=with_software(commit="f" * 40, code="0ther"))) == [
        f"error: h3: project 0.1.0 commit fffffffff code 0ther, on h1, h2 {usual}: {mend}"
    ]
    assert found(three(h3=with_software(commit="f" * 40))) == [
        f"warning: h3: project 0.1.0 commit fffffffff code c0de, on h1, h2 {usual}: {mend}"
    ]
    assert found(three(h3=with_software(commit=None))) == []  # it has no git
    (line,) = found(three(h3=with_software(commit=None, code="0ther")))
    assert line.startswith(f"error: h3: project 0.1.0 code 0ther, on h1, h2 {usual}: ")


def test_another_mtu_or_speed_on_the_shared_network():
    mtu, speed = found(three(), shared=network(h2={"mtu": 9000, "speed_mbps": 1000}))
    assert mtu.startswith("warning: h2: the MTU of eth2 is 9000, on h1, h3 1500, and large packets may be lost: ")
    assert speed.startswith("warning: h2: eth2 runs at 1000 Mb/s, on h1, h3 25000 Mb/s: `ethtool eth2` there")
    assert found(three(), shared=network(h2={"mtu": None, "speed_mbps": None})) == []


def test_locked_memory_counts_where_there_is_infiniband():
    def with_limit(mib, topology):
        facts = three(h1=condition(locked_memory_mib=mib))
        return {**facts, "h1": replace(facts["h1"], topology=topology)}

    up = with_ports(machine(), mlx5_0="InfiniBand")
    (line,) = found(with_limit(8, up))
    assert line.startswith("error: h1: a process may lock 8 MiB, too little for NCCL over InfiniBand: `* - memlock")
    assert found(with_limit(8, up), given=["NCCL_IB_DISABLE"]) == []
    assert found(with_limit(8, with_ports(machine(), mlx5_0="down"))) == []
    assert found(with_limit(64 << 10, up)) == []


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (condition(shm_free_mib=64 * 8), None),  # each of its eight ranks needs 64
        (condition(shm_free_mib=64), "warning: h2: /dev/shm has 64 MiB free, its ranks need 512: --ipc=host"),
        (condition(shm_free_mib=0), "error: h2: /dev/shm has 0 MiB free, its ranks need 512: "),
        (condition(shm_free_mib=None), "error: h2: /dev/shm does not exist: "),
        (condition(missing_program="/env/python"), "error: h2: the program '/env/python' is missing or may not be ex"),
        (condition(sees_token=False), "warning: h2: /shared/runs is another folder there than here: mount the same"),
        (with_folder(0, free_mib=1024), "warning: h2: /shared/runs has 1.0 GiB free: remove old runs there"),
        (with_folder(0, writable=False), "error: h2: /shared/runs cannot be written there: give this user the right"),
        (with_folder(1, there=False), "warning: h2: /shared/data is missing there: copy it there, or share it"),
        (with_folder(0, there=False), None),  # it is made
        (with_folder(1, writable=False), None),  # it is read alone
        (condition(sees_token=None, folders=(replace(FOLDERS[0], free_mib=None), FOLDERS[1])), None),
    ],
)
def test_memory_program_and_folders_of_a_training(odd, problem):
    lines = found(three(h2=odd), ranks=dict.fromkeys(HOSTS, 8)) + facts_of(folder_findings(three(h2=odd)))
    assert [line[: len(problem or "")] for line in lines] == ([problem] if problem else [])
    nowhere = three(**dict.fromkeys(HOSTS, with_folder(1, there=False)))
    assert list(folder_findings(nowhere)) == []


def settings(**values):
    given = (Setting(name=name, value=value, source="/etc/nccl.conf") for name, value in values.items())
    return condition(settings=tuple(given))


def test_settings_that_differ_are_told_unless_the_launcher_gives_them_or_each_host_has_its_own():
    odd = three(h2=settings(NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="eth0"))
    (line,) = found(odd)
    assert line.startswith("warning: h2: NCCL_IB_DISABLE is '1', on h1, h3 not set: `export NCCL_IB_DISABLE=1` here")
    assert line.endswith("or take it out of /etc/nccl.conf on h2")
    assert found(odd, given=["NCCL_IB_DISABLE"]) == []
    most = three(**{host: settings(HOROVOD_CYCLE_TIME="5") for host in ("h1", "h2")})
    (line,) = found(most)
    assert line.startswith("warning: h3: HOROVOD_CYCLE_TIME is not set, on h1, h2 '5': ")
    assert line.endswith("or take it out of /etc/nccl.conf on h1")
    assert found(three(**dict.fromkeys(HOSTS, settings(NCCL_DEBUG="INFO")))) == []


def test_errors_come_first_and_what_is_alike_on_several_hosts_is_one_line():
    few = with_folder(0, free_mib=512)
    lines = found(three(h1=few, h2=few, h3=with_software(torch=None)), shared=network(h3={"mtu": 9000}))
    assert [line.split(": ")[:2] for line in lines] == [["error", "h3"], ["warning", "h3"], ["warning", "h1, h2"]]
    assert findings.named([f"h{i}" for i in range(10)]).endswith("h7 and 2 more")


@pytest.mark.parametrize(
    ("error", "problem", "remedy"),
    [
        ("host h1: its host key is unknown: connect by hand", "its host key is unknown", "connect by hand"),
        ("host h1: the probe failed: a: b", "the probe failed: a: b", "try it there by hand"),
        ("host h1: unknown. Run `x`, then y.", "unknown", "Run `x`, then y"),
    ],
)
def test_an_error_is_a_finding_with_a_remedy(error, problem, remedy):
    made = from_error(HostError(error), ["h1"], "reached")
    assert (made.severity, made.hosts, made.about, made.problem) == ("error", ("h1",), "reached", problem)
    assert made.remedy.startswith(remedy)
    assert str(made) == f"error: h1: {problem}. {made.remedy[0].upper()}{made.remedy[1:]}."
    detailed = from_error(HostError(error, ["Welcome", "No ED25519 key"]), ["h1"], "reached")
    assert (detailed.problem, detailed.remedy) == (f"{problem} (No ED25519 key)", made.remedy)
