import contextlib
import re
from dataclasses import replace

import pytest

from hvdtrain.insight.tracking.environment import read_plan
from launch.errors import CommandError, HostError, LaunchError, PlacementError
from launch.hosts.host import Host
from launch.hosts.host_facts import HostFacts
from launch.machine.mpi import Mpi
from launch.machine.topology import Interface
from launch.process import Answer
from launch.run.start import decide, facts, prepare
from launch.run.start.launchers import choose, horovodrun, srun
from launch.run.start.request import Attempt
from tests.unit.machines import RING, hosts, machine, request

MPI = Mpi(path="/opt/openmpi/bin/mpirun", name="Open MPI", version=(4, 1, 8))
HIDDEN = "s3cret!"
ENVIRONMENT = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "MY_TOKEN": HIDDEN}
CLUSTER = {"h1": (("eth0", "10.0.0.1/24"), ("docker0", "172.17.0.1/16")), "h2": (("ens5", "10.0.0.2/24"),)}
INSTALLED = ("prog", "apptainer")
SLURM = {"SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
BARE = tuple(Host(name=name, slots=1, counted=False) for name in ("h1", "h2"))
BOTH = {"np": 3, "hosts": hosts(h1=2, h2=1)}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """What prepare asks the outside for: programs on PATH, hosts, and this run, which has h1's NICs."""
    cluster = {host: machine(interfaces=nics) for host, nics in CLUSTER.items()}
    known = {"localhost": machine(), "bare": machine(0), **cluster}
    paths = {"mpirun": MPI.path, "horovodrun": "/opt/venv/bin/horovodrun"}
    answers = {
        host: HostFacts(host=host, hostname=f"{host}.local", topology=topology, mpi=MPI, address=None, port=port)
        for port, (host, topology) in enumerate(known.items(), 20_000)
    }
    questions = []

    def probe_hosts(names, **how):
        questions.append((names, how))
        return {name: answers[name] for name in names}

    paths |= {program: f"/bin/{program}" for program in INSTALLED}
    for module in (facts, choose, horovodrun, srun):
        monkeypatch.setattr(module, "find", lambda program, *_: paths.get(program))
    monkeypatch.setattr(choose, "read_mpi", lambda _: MPI)
    monkeypatch.setattr(facts, "probe_hosts", probe_hosts)
    monkeypatch.setattr(facts, "is_local", lambda host: host == "localhost")
    monkeypatch.setattr(facts, "interfaces", lambda: known["h1"].interfaces)
    monkeypatch.setattr(prepare, "try_networks", lambda tried, *_, **__: [""] * len(tried))
    return {"questions": questions, "facts": answers, "paths": paths}


def prepared(tmp_path, environment=None, **changes):
    return prepare.prepare(request(**changes), ENVIRONMENT if environment is None else environment, tmp_path)


def test_without_hosts_this_one_has_as_many_slots_as_gpus(tmp_path, world):
    run = prepared(tmp_path, np=4)
    assert [(slot.host, slot.gpu) for slot in run.plan.slots] == [("localhost", gpu) for gpu in RING]
    names, how = world["questions"][0]
    assert (names, how["folder"]) == (["localhost"], str(tmp_path))
    assert (run.plan.network, run.plan.remarks) == (None, ())


def test_on_cpus_it_has_as_many_as_asked_for_and_says_so(tmp_path, world):
    assert prepared(tmp_path, np=9, gpus="none").plan.remarks == ("note: --gpus none, running on CPU",)
    assert world["questions"][-1][1]["gpus"] is False
    bare = prepared(tmp_path, np=9, topologies={"bare": machine(0)}).plan
    assert (len(bare.slots), bare.remarks) == (9, ("note: no GPU found, running on CPU",))


def test_one_host_needs_no_network(tmp_path):
    alone = prepared(tmp_path, np=2, network="ib1").plan
    assert (alone.network, alone.remarks) == (None, ("note: --network 'ib1' is not used: one host needs no network",))


@pytest.fixture
def two_networks(world, monkeypatch):
    """h1 and h2, reached over eth0, and what was asked about networks; a test may set the answers."""
    known = world["facts"]
    speeds = {"br0": 40_000, "eth0": 1000}
    for host in ("h1", "h2"):
        own = machine(interfaces=(("br0", f"192.168.1.{host[1]}/24"), ("eth0", f"10.0.0.{host[1]}/24")))
        nics = tuple(replace(nic, speed_mbps=speeds[nic.name]) for nic in own.interfaces)
        known[host] = replace(known[host], topology=replace(own, interfaces=nics), address=f"10.0.0.{host[1]}")
    asked, answers = [], ["h1 to h2: no answer", ""]

    def try_networks(addresses, ports, **how):
        asked.append((addresses, ports, how))
        return answers

    monkeypatch.setattr(prepare, "try_networks", try_networks)
    monkeypatch.setattr(facts, "interfaces", lambda: known["h1"].topology.interfaces)
    monkeypatch.setattr(facts, "address_toward", lambda _: "10.0.0.1")
    return asked, answers


@pytest.mark.parametrize(
    ("environment", "changes", "network"),
    [
        ({}, {"network": "br0"}, "br0"),
        ({"NCCL_SOCKET_IFNAME": "br0"}, {}, "10.0.0.0/24"),
        ({"OMPI_MCA_btl_tcp_if_include": "br0"}, {}, "10.0.0.0/24"),
        ({}, {"np": 2}, "10.0.0.0/24"),  # one host
    ],
)
def test_nothing_is_tried_if_one_host_or_the_user_decides(tmp_path, two_networks, environment, changes, network):
    plan = prepared(tmp_path, environment, **{**BOTH, **changes}).plan
    assert (plan.network, two_networks[0]) == (network, [])
    assert not [remark for remark in plan.remarks if "networks" in remark]


def test_the_only_network_is_tried_unless_ssh_uses_it(tmp_path, world, two_networks):
    asked, answers = two_networks
    for host in ("h1", "h2"):
        own = world["facts"][host]
        eth0 = replace(own.topology, interfaces=own.topology.interfaces[1:])
        world["facts"][host] = replace(own, topology=eth0)
    assert prepared(tmp_path, **BOTH).plan.network == "10.0.0.0/24"
    assert asked == []
    world["facts"]["h2"] = replace(world["facts"]["h2"], address="203.0.113.7")
    answers.pop()
    with pytest.raises(PlacementError, match="the hosts do not reach each other"):
        prepared(tmp_path, **BOTH)


def test_hosts_that_are_reached_over_ipv6_alone_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "interfaces", lambda: (Interface(name="lan", cidr="192.168.0.9/24"),))
    with pytest.raises(HostError, match="h1, h2 are reached over IPv6, mpirun needs IPv4: add `AddressFamily inet`"):
        prepared(tmp_path, **BOTH)


def test_two_names_of_one_host_are_refused(tmp_path, world):
    world["facts"]["h2"] = replace(world["facts"]["h2"], hostname="h1.local")
    with pytest.raises(HostError, match=r"h1 and h2 are the same host, h1\.local: name it once, with all its slots"):
        prepared(tmp_path, **BOTH)


@pytest.mark.parametrize(
    ("environment", "changes", "placed"),
    [
        ({}, {"np": None, "hosts": BARE}, ["h1"] * 4 + ["h2"] * 4),
        ({}, {"np": 5, "hosts": BARE}, ["h1"] * 4 + ["h2"]),
        ({}, {"np": 6, "hosts": hosts(h1=64, h2=64)}, ["h1"] * 4 + ["h2"] * 2),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "128(x2)"}, {"np": None}, ["h1"] * 4 + ["h2"] * 4),
        ({}, {"np": None, "per_host": 3, "hosts": hosts(localhost=4), "gpus": "none"}, ["localhost"] * 3),
        (SLURM, {"np": 2}, ["h1", "h1"]),
        (SLURM, {"np": None, "per_host": 1}, ["h1", "h2"]),
        (SLURM, {"np": 2, "hosts": hosts(localhost=2)}, ["localhost"] * 2),  # one that is named is used
        ({}, {"np": 1, "hosts": hosts(h1=1), "program": ("missing",)}, ["h1"]),  # it may be there
        ({}, {"np": 1, "hosts": hosts(h1=1), "nsys": True}, ["h1"]),
    ],
)
def test_ranks_are_where_hosts_slurm_and_options_say(tmp_path, environment, changes, placed):
    assert [slot.host for slot in prepared(tmp_path, environment, **changes).plan.slots] == placed


def test_in_a_step_its_nodes_are_used_and_a_note_says_so(tmp_path):
    step = {"SLURM_STEP_NODELIST": "h2", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"}
    plan = prepared(tmp_path, {**SLURM, **step}, np=None).plan
    assert [slot.host for slot in plan.slots] == ["h2"] * 4
    (note,) = plan.remarks
    assert note.startswith("note: this shell is a Slurm step on h2, 1 of the 2 nodes of the job: ")
    assert prepared(tmp_path, {**SLURM, **step}, np=2, hosts=hosts(h1=2)).plan.remarks == ()
    whole = {**SLURM, "SLURM_STEP_NODELIST": "h[1-2]"}
    assert prepared(tmp_path, whole, np=None).plan.remarks == ()


def test_slots_that_are_cores_are_named_if_they_decide_the_number_of_ranks(tmp_path, world):
    cores = {"hosts": hosts(h1=64, h2=4)}
    taken = replace(world["facts"]["h1"].topology, gpus=machine(unusable={1: "busy: pid 7"}).gpus)
    world["facts"]["h1"] = replace(world["facts"]["h1"], topology=taken)
    busy, slots = prepared(tmp_path, {}, np=None, **cores).plan.remarks
    assert busy == "note: GPU 1 of h1: busy: pid 7, not used"
    assert slots == "note: h1: more slots than GPUs, one rank for each free GPU"
    assert prepared(tmp_path, {}, np=5, **cores).plan.remarks == ()


@pytest.mark.parametrize(
    ("environment", "changes", "line"),
    [
        ({}, {"np": None, "per_host": 8}, "host localhost has 4 free GPUs for 8 ranks: start fewer"),
        ({}, {"program": ("missing",)}, "no program 'missing' on this host: correct what stands after --"),
        ({}, {"nsys": True}, "--nsys: no nsys on this host: put the bin folder of Nsight"),
        ({"HVDLAUNCH_JOB": "a\nb"}, {}, r"HVDLAUNCH_JOB='a\\nb': use a name"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, environment, changes, line):
    with pytest.raises(LaunchError, match=f"^{line}") as refused:
        prepared(tmp_path, environment, **changes)
    assert str(refused.value).isprintable()


def test_this_host_gets_the_first_ranks_wherever_it_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "is_local", lambda host: host == "h1")
    run = prepared(tmp_path, np=3, hosts=hosts(h2=2, h1=1))
    assert [slot.host for slot in run.plan.slots] == ["h1", "h2", "h2"]


def test_with_saved_topologies_nobody_is_asked(tmp_path, world):
    world["paths"].clear()
    run = prepared(tmp_path, np=3, hosts=hosts(far=4), topologies={"far": machine()})
    assert world["questions"] == []
    assert [slot.gpu for slot in run.plan.slots] == [0, 1, 2]
    assert run.argv[0] == "mpirun"
    assert read_plan(run.environment["HVDLAUNCH_PLAN"])["ranks"][0]["hostname"] is None
    other = prepared(tmp_path, launcher="horovodrun", topologies={"far": machine()})
    assert other.argv[0] == "horovodrun"


def test_the_launcher_is_the_one_of_path(tmp_path, world, monkeypatch):
    assert prepared(tmp_path).argv[0] == MPI.path
    assert prepared(tmp_path, launcher="horovodrun").argv[0] == "/opt/venv/bin/horovodrun"
    del world["paths"]["horovodrun"]
    with pytest.raises(CommandError, match="no horovodrun on PATH: activate"):
        prepared(tmp_path, launcher="horovodrun")
    for other in (replace(MPI, name="MPICH"), replace(MPI, version=(3, 1, 6)), replace(MPI, version=(6,))):
        monkeypatch.setattr(choose, "read_mpi", lambda _, other=other: other)
        with pytest.raises(CommandError, match=f"^/opt/openmpi/bin/mpirun is {other}: Open MPI 4 or 5 is needed, put"):
            prepared(tmp_path)
    monkeypatch.setattr(choose, "read_mpi", lambda _: None)
    with pytest.raises(CommandError, match="does not say which MPI it is"):
        prepared(tmp_path)
    del world["paths"]["mpirun"]
    with pytest.raises(CommandError, match=r"no mpirun on PATH\. Install"):
        prepared(tmp_path)


@pytest.mark.parametrize(
    ("plugins", "environment", "line"),
    [
        ("", {}, "^--launcher srun: this is not a Slurm allocation"),
        ("MPI plugin types are...\n\tnone\n", SLURM, "^--launcher srun: this Slurm has no PMIx"),
        ("MPI plugin types are...\n\tpmix\n", SLURM, None),
    ],
)
def test_srun_needs_an_allocation_and_pmix(tmp_path, world, monkeypatch, *, plugins, environment, line):
    world["paths"]["srun"] = "/usr/bin/srun"
    monkeypatch.setattr(srun.srun, "inside", lambda _: bool(environment))
    monkeypatch.setattr(srun, "ask", lambda *_, **__: Answer(status=0, out="", err=plugins))
    with pytest.raises(CommandError, match=line) if line else contextlib.nullcontext():
        assert prepared(tmp_path, environment, launcher="srun").argv[0] == "/usr/bin/srun"


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image, and the answers of the programs inside."""
    file = tmp_path / "a.sif"
    file.touch()
    answers = {name: Answer(status=0, out="mpirun (Open MPI) 4.0.1", err="") for name in ("mpirun", "nsys")}

    def ask(argv, timeout_s):
        assert (argv[:3], argv[4:]) == (["apptainer", "exec", str(file)], ["--version"])
        return answers[argv[3]]

    monkeypatch.setattr(facts, "ask_program", ask)
    return str(file), answers


def test_inside_an_image_it_is_the_image_that_must_have_nsight_systems(tmp_path, world, image):
    file, answers = image
    nsys = decide.under_nsys(("prog", "--lr", "0.1"), "OMPI_COMM_WORLD_RANK")
    assert prepared(tmp_path, apptainer=file, nsys=True).plan.program == decide.in_apptainer(nsys, file)
    answers["nsys"] = Answer(status=255, out="", err="")
    with pytest.raises(CommandError, match=r"^--nsys: no nsys inside .*a\.sif: install Nsight Systems there"):
        prepared(tmp_path, apptainer=file, nsys=True)
    del world["paths"]["apptainer"]
    with pytest.raises(CommandError, match=r"^--apptainer .*a\.sif: no apptainer on this machine to look into it"):
        prepared(tmp_path, apptainer=file, np=1, hosts=hosts(h1=1))
    with pytest.raises(CommandError, match="no program 'apptainer' on this host: install it, or leave --apptainer"):
        prepared(tmp_path, apptainer=file)


@pytest.mark.parametrize(
    ("status", "out", "inside"),
    [(0, "mpirun (Open MPI) 5.0.3", "Open MPI 5.0.3"), (127, "", "no mpirun"), (0, "HYDRA\nVersion: 4.1", "MPICH 4.1")],
)
def test_an_image_with_another_mpi_is_refused(tmp_path, image, status, out, inside):
    image[1]["mpirun"] = Answer(status=status, out=out, err="")
    with pytest.raises(CommandError, match=f"a.sif: inside is {inside}, outside Open MPI 4.1.8: ranks inside only"):
        prepared(tmp_path, apptainer=image[0])


def test_without_ssh_one_host_starts(tmp_path, world):
    def agent(**where):
        argv = prepared(tmp_path, **where).argv
        return [argv[place + 1] for place, word in enumerate(argv) if word == "plm_rsh_agent"]

    assert (agent(), agent(**BOTH)) == (["false"], ["ssh"])
    world["paths"]["ssh"] = "/usr/bin/ssh"
    assert agent() == ["ssh"]


def test_ranks_meet_where_rank_0_is_on_a_port_that_is_free_there(tmp_path):
    def met(environment=None, **changes):
        shared = read_plan(prepared(tmp_path, environment, **changes).environment["HVDLAUNCH_PLAN"])["rendezvous"]
        return {name: value for name, value in shared.items() if name.startswith("MASTER_")}

    assert met(np=3, hosts=hosts(h2=2, h1=1)) == {"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "20003"}
    assert met(np=2) == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20000"}
    own = {**ENVIRONMENT, "MASTER_PORT": "29500"}
    assert met(own, np=2, exports=("MASTER_PORT",)) == {"MASTER_ADDR": "127.0.0.1"}
    assert met(own, np=2)["MASTER_PORT"] == "20000"  # what a shell happens to have
    assert met(hosts=hosts(far=4), topologies={"far": machine()}) == {}


def test_programs_find_what_torchrun_would_have_told_them(tmp_path):
    """But no store of a launcher's, which torch would wait for; what -x passes is the user's."""
    environment = {**ENVIRONMENT, "HVDLAUNCH_JOB": "mine", "ROLE_NAME": "trainer"}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    third = Attempt(restart=2, max_restarts=5)
    shared = prepared(tmp_path, environment, exports=("ROLE_NAME",), attempt=third).plan.rendezvous
    told = {"RUN_ID": "mine", "RESTART_COUNT": "2", "MAX_RESTARTS": "5", "USE_AGENT_STORE": "False"}
    told = {f"TORCHELASTIC_{name}": value for name, value in told.items()} | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert {name: value for name, value in shared.items() if not name.startswith("MASTER_")} == told
    assert prepared(tmp_path).plan.rendezvous["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_a_program_is_found_here_once_and_looked_for_on_each_host(tmp_path, world):
    run = prepared(tmp_path, **BOTH)
    told = read_plan(run.environment["HVDLAUNCH_PLAN"])
    assert (run.plan.executable, told["executable"], told["path"]) == ("/bin/prog", "/bin/prog", "/bin")
    assert world["questions"][-1][1]["inspection"].program == "/bin/prog"
    assert run.argv[run.argv.index("--") + 1] == "prog"  # the words stay the user's
    world["paths"]["nsys"] = "/opt/nsys"
    assert prepared(tmp_path, nsys=True).plan.executable == "/opt/nsys"
    elsewhere = prepared(tmp_path, program=("theirs",), np=1, hosts=hosts(h1=1)).plan  # this host gets no rank
    assert elsewhere.executable is None


def test_a_job_keeps_its_name_and_else_gets_one_of_the_time(tmp_path):
    assert prepared(tmp_path, {"HVDLAUNCH_JOB": "mine"}).environment["HVDLAUNCH_JOB"] == "mine"
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", prepared(tmp_path).environment["HVDLAUNCH_JOB"])
