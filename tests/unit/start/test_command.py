"""The golden files hold the commands: `python -m tests.unit.start.test_command` writes them anew."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.choose.placement import place
from launch.errors import CommandError
from launch.hosts import hostfile
from launch.machine.mpi import Mpi
from launch.reach.ssh import SSH_OPTIONS
from launch.start import command
from launch.start.command import Order
from tests.unit.machines import hosts, machine

GOLDEN = Path(__file__).parents[2] / "golden"
OURS = ("HVDLAUNCH_JOB", "HVDLAUNCH_PLAN", "HVDLAUNCH_REPORT", "PATH")
MPI4 = Mpi(path="/opt/openmpi/bin/mpirun", name="Open MPI", version=(4, 1, 8))
MPI5 = replace(MPI4, version=(5, 0, 3))
TRAIN = ("python", "-m", "hvdtrain.effnet", "--data", "digits")


def order(mpi=MPI4, *, where=None, **changes):
    where = where or hosts(localhost=2)
    several = len(where) > 1
    slots = place(
        where,
        {host.name: machine() for host in where},
        np=sum(host.slots for host in where),
        gpus="auto",
        binding="numa",
    )
    plain = Order(
        slots=slots,
        program=TRAIN,
        python="/opt/venv/bin/python",
        mpi=mpi,
        horovodrun=None,
        network="10.0.0.0/24" if several else None,
        daemon_networks="10.0.0.0/24" if several else None,
        exports=OURS,
        as_root=False,
    )
    return replace(plain, **changes)


THREE = hosts(**{"h1": 2, "h2.cluster.example": 1})
HOROVODRUN = "/opt/venv/bin/horovodrun"
ORDERS = {
    "openmpi4_one_host": order(),
    "openmpi4_hosts": order(where=THREE),
    "openmpi4_login_node": order(where=THREE, daemon_networks="10.0.0.0/24,192.168.0.0/16"),
    "openmpi4_root": order(as_root=True, exports=(*OURS, "NCCL_DEBUG")),
    "openmpi4_apptainer": order(where=THREE, program=command.in_apptainer(TRAIN, "/images/hvd train.sif")),
    "openmpi5_one_host": order(MPI5),
    "openmpi5_hosts": order(MPI5, where=THREE),
    "horovodrun_openmpi4_one_host": order(horovodrun=HOROVODRUN),
    "horovodrun_openmpi4_hosts": order(where=THREE, horovodrun=HOROVODRUN),
    "horovodrun_openmpi5_one_host": order(MPI5, horovodrun=HOROVODRUN),
    "horovodrun_openmpi5_hosts": order(MPI5, where=THREE, horovodrun=HOROVODRUN),
}
LAUNCH = ["/opt/venv/bin/python", "-m", "launch", "run", "-np", "8", "-x", "NCCL_DEBUG", "--", *TRAIN, "--name", "it's"]
SCRIPTS = {
    "sbatch_anywhere": command.sbatch(
        LAUNCH, name="hvdtrain.effnet", folder="/data/my runs", np=8, nodes=(), gpus=True, grace_s=25
    ),
    "sbatch_nodes": command.sbatch(
        LAUNCH, name="python", folder="/data", np=8, nodes=("node01", "node02"), gpus=False, grace_s=0.5
    ),
}


def golden_texts():
    texts = {name: lines(command.argv(one)) for name, one in ORDERS.items()}
    return {f"{name}.txt": text for name, text in texts.items()} | {f"{name}.sbatch": s for name, s in SCRIPTS.items()}


def lines(argv):
    """The words as a shell takes them: each option with its values on a line of its own, then the program."""
    program = argv.index("/opt/venv/bin/python")
    rows = []
    for word in argv[:program]:
        if word.startswith("-") or not rows:
            rows.append([])
        rows[-1].append(word)
    return " \\\n    ".join(map(shlex.join, [*rows, argv[program:]])) + "\n"


@pytest.mark.parametrize("name", golden_texts())
def test_commands_and_scripts_are_those_of_the_golden_files(name):
    assert golden_texts()[name] == (GOLDEN / name).read_text()


def test_every_golden_file_is_of_a_test():
    assert {path.name for path in GOLDEN.glob("*")} >= set(golden_texts())
    known = ("openmpi", "horovodrun", "sbatch")
    assert {path.name for path in GOLDEN.glob("*") if path.name.startswith(known)} == set(golden_texts())


def option(argv, name):
    return [argv[i + 1] for i, word in enumerate(argv) if word == name]


def mca(argv):
    """name -> value of all MCA parameters, of ranks and of daemons."""
    found = [tuple(argv[i + 1 : i + 3]) for i, word in enumerate(argv) if word in ("--mca", "--prtemca")]
    assert len(dict(found)) == len(found)
    return dict(found)


def inner(argv):
    """The words that mpirun gets in the end, through horovodrun too."""
    return [
        inside
        for word in argv
        for inside in (
            shlex.split(word.partition("=")[2]) if word.startswith(("--mpi-args=", "--binding-args=")) else [word]
        )
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_what_every_command_has(name):
    one = ORDERS[name]
    words = inner(command.argv(one))
    parameters = mca(words)
    ssh = parameters["plm_ssh_args" if one.mpi.version[0] == 5 else "plm_rsh_args"]
    assert shlex.split(ssh) == list(SSH_OPTIONS)
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ServerAliveInterval=2"} <= set(shlex.split(ssh))
    assert {"oob_tcp_keepalive_time", "oob_tcp_keepalive_intvl", "oob_tcp_keepalive_probes"} <= parameters.keys()
    assert option(words, "--bind-to") == ["none"]
    assert option(words, "--map-by") == ["slot"]
    assert option(words, "-np") == [str(len(one.slots))]
    assert words[words.index(one.python) :] == [one.python, "-P", "-m", "launch.rank.bind", "--", *one.program]
    assert ("--allow-run-as-root" in words) is one.as_root
    assert option(words, "-x") == ([] if one.horovodrun else list(one.exports))
    if one.network:
        reach = parameters["prte_if_include" if one.mpi.version[0] == 5 else "oob_tcp_if_include"]
        assert reach == one.daemon_networks
        assert one.network in (parameters.get("btl_tcp_if_include"), *option(words, "--network-interfaces"))
    assert ("--prefix" in words) is bool(one.horovodrun and one.network)


@pytest.mark.parametrize(
    "mpi", [replace(MPI4, name="MPICH", version=(4, 1)), replace(MPI4, version=(3, 1, 6)), replace(MPI4, version=(6,))]
)
def test_other_launchers_are_refused_with_their_path(mpi):
    with pytest.raises(CommandError, match=r"^/opt/openmpi/bin/mpirun is \S.* \d.*: Open MPI 4 or 5 is needed, put"):
        command.argv(order(mpi))


def test_hosts_are_named_once_with_their_ranks():
    assert hostfile.to_option(command.hosts(order(where=THREE).slots)) == "h1:2,h2.cluster.example:1"


ALLOWED = dict.fromkeys(
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_HOME", "TORCH_HOME", "HVDTRAIN_DATA"),
    "some value",
)
SECRETS = ("HVDTRAIN_TOKEN", "TORCH_API_KEY", "PYTHON_SECRET", "OMP_password", "MKL_AUTH", "HVDTRAIN_CREDENTIALS")
OTHERS = ("HOME", "PATHS", "MY_PATH", "AWS_ACCESS_KEY_ID", "NCCL_DEBUG", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
WITHHELD = dict.fromkeys((*SECRETS, *OTHERS, "TORCH_PASSPHRASE", "OMPI_COMM_WORLD_RANK"), "a value")


def test_ranks_get_what_is_on_the_list_and_no_secret():
    ours = {"HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}
    assert set(command.exported({**ALLOWED, **WITHHELD}, ())) == {*ALLOWED, *ours}
    assert set(command.exported({}, ())) == ours


@pytest.mark.parametrize("name", WITHHELD)
def test_what_is_asked_for_is_given(name):
    given_ = command.exported({**ALLOWED, **WITHHELD}, (name,))
    assert name in given_
    assert set(given_) == {*command.exported(ALLOWED, ()), name}
    assert list(given_) == sorted(given_)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("A=B-secret", r"^-x 'A': give the name of a variable alone and set it in the environment"),
        ("A B", r"^-x 'A B': give the name of a variable alone"),
        ("", r"^-x '': give the name"),
        ("1A", r"^-x '1A': give the name"),
        ("-oProxyCommand", r"^-x '-oProxyCommand': give the name"),
        ("A\n", r"^-x 'A\\n': give the name"),
        ("Ä", r"^-x 'Ä': give the name"),
        ("MISSING", r"^-x MISSING: there is no such variable in the environment: set it, or leave -x out$"),
    ],
)
def test_exports_are_names_of_variables_that_are_there(asked, message):
    with pytest.raises(CommandError, match=message) as refused:
        command.exported({"A": "B-secret"}, (asked,))
    assert "secret" not in str(refused.value)


NAMES = st.sampled_from(sorted(ALLOWED | WITHHELD)) | st.from_regex(r"[A-Z_][A-Z0-9_]{0,12}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=4, max_size=20)


@given(environment=st.dictionaries(NAMES, VALUES, max_size=8), data=st.data())
def test_no_value_of_a_variable_is_ever_on_a_command_line(environment, data):
    asked = data.draw(st.lists(st.sampled_from(sorted(environment)), max_size=3)) if environment else []
    exports = command.exported(environment, asked)
    for before in (ORDERS["openmpi4_one_host"], ORDERS["openmpi5_hosts"], ORDERS["horovodrun_openmpi4_hosts"]):
        one = replace(before, exports=exports)
        ours = " ".join([*command.argv(before), *environment])
        for value in environment.values():
            assert value in ours or value not in " ".join(command.argv(one))
        for name in environment.keys() - set(exports):
            assert name not in command.argv(one)
    secret = {name for name in environment if command.SECRET.search(name)}
    assert not secret & (set(exports) - set(asked))


def test_several_hosts_get_only_what_is_on_the_list():
    inherited = {
        **ALLOWED,
        **WITHHELD,
        "SSH_AUTH_SOCK": "/agent",
        "SLURM_JOB_ID": "7",
        "LC_ALL": "C",
        "OMPI_MCA_x": "1",
    }
    exports = command.exported(inherited, ("NCCL_DEBUG",))
    ours = {"HVDLAUNCH_PLAN": "{}", "PATH": "/ours"}
    several = command.environment(order(where=THREE, exports=exports), inherited, ours)
    assert set(several) == {
        *ALLOWED,
        "HOME",
        "NCCL_DEBUG",
        "SSH_AUTH_SOCK",
        "SLURM_JOB_ID",
        "LC_ALL",
        "OMPI_MCA_x",
        "HVDLAUNCH_PLAN",
    }
    assert several["PATH"] == "/ours"
    assert command.environment(order(exports=exports), inherited, ours) == {**inherited, **ours}


def test_a_rank_sees_its_gpu_by_uuid_and_its_threads_and_networks():
    slot = order().slots[1]
    everything = command.rank_environment(slot, interface="eth0", adapters=("mlx5_0", "mlx5_1"), set_by_user=())
    assert everything == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-2222",
        "OMP_NUM_THREADS": "8",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
    }
    plain = command.rank_environment(slot, interface=None, adapters=(), set_by_user=())
    assert plain == {
        name: everything[name] for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    }


def test_what_the_user_has_set_stays():
    kept = ("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES")
    chosen = command.rank_environment(order().slots[0], interface="eth0", adapters=("mlx5_0",), set_by_user=kept)
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-0000"}


def test_a_rank_on_cpus_sees_no_gpu_and_one_without_a_uuid_its_index():
    slot = replace(order().slots[1], gpu_uuid=None, threads=None)
    assert command.rank_environment(slot, interface=None, adapters=(), set_by_user=())["CUDA_VISIBLE_DEVICES"] == "2"
    on_cpus = command.rank_environment(replace(slot, gpu=None), interface=None, adapters=("mlx5_0",), set_by_user=())
    assert on_cpus == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""}


def test_the_plan_tells_each_rank_its_place():
    one = order(where=THREE)
    own = [{"CUDA_VISIBLE_DEVICES": slot.gpu_uuid} for slot in one.slots]
    told = command.plan(one, {"h1": "h1.local", "h2.cluster.example": "h2"}, own, {"NCCL_DEBUG": "INFO"})
    plan = json.loads(told)
    assert (plan["launcher"], plan["program"]) == ("Open MPI 4.1.8", list(TRAIN))
    assert plan["environment"] == {"NCCL_DEBUG": "INFO"}
    assert [rank["hostname"] for rank in plan["ranks"]] == ["h1.local", "h1.local", "h2"]
    assert plan["ranks"][1] == {
        "rank": 1,
        "host": "h1",
        "hostname": "h1.local",
        "local_rank": 1,
        "gpu": 2,
        "gpu_uuid": "GPU-2222",
        "numa": [1],
        "cores": "8-15",
        "threads": 8,
        "environment": {"CUDA_VISIBLE_DEVICES": "GPU-2222"},
    }
    by_horovodrun = command.plan(
        replace(one, horovodrun=HOROVODRUN), dict.fromkeys(["h1", "h2.cluster.example"]), own, {}
    )
    assert json.loads(by_horovodrun)["launcher"] == "horovodrun, Open MPI 4.1.8"


def test_a_plan_that_no_variable_holds_is_refused():
    one = order(program=("x" * command.LONGEST_PLAN,))
    with pytest.raises(CommandError, match="the plan of 2 ranks takes 13"):
        command.plan(one, {"localhost": "here"}, [{}, {}], {})


def test_a_name_with_a_line_end_begins_no_line_of_the_script():
    script = command.sbatch(["true"], name="a\nrm -rf x", folder="/a\nb", np=1, nodes=(), gpus=False, grace_s=25)
    assert script.splitlines()[1] == "#SBATCH --job-name=a_rm_-rf_x"
    assert "cd '/a\nb' || exit 2\n" in script
    assert script.endswith('\nexport HVDLAUNCH_JOB="${HVDLAUNCH_JOB:-a_rm_-rf_x-$SLURM_JOB_ID}"\nexec true\n')


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden_name, golden_text in golden_texts().items():
        (GOLDEN / golden_name).write_text(golden_text)
