import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import CommandError
from launch.start import command
from launch.start.environment import (
    MAX_PLAN_CHARACTERS,
    SECRET,
    exported,
    launcher_environment,
    plan_json,
    rank_environment,
)
from tests.unit.start.specs import HOROVODRUN, MPI5, THREE, TRAIN, spec

ALLOWED = dict.fromkeys(
    ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_HOME", "TORCH_HOME", "HVDTRAIN_DATA"),
    "some value",
)
SECRETS = ("HVDTRAIN_TOKEN", "TORCH_API_KEY", "PYTHON_SECRET", "OMP_password", "MKL_AUTH", "HVDTRAIN_CREDENTIALS")
OTHERS = ("HOME", "PATHS", "MY_PATH", "AWS_ACCESS_KEY_ID", "NCCL_DEBUG", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
WITHHELD = dict.fromkeys((*SECRETS, *OTHERS, "TORCH_PASSPHRASE", "OMPI_COMM_WORLD_RANK"), "a value")


def test_ranks_get_what_is_on_the_list_and_no_secret():
    ours = {"HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}
    assert set(exported({**ALLOWED, **WITHHELD}, ())) == {*ALLOWED, *ours}
    assert set(exported({}, ())) == ours


@pytest.mark.parametrize("name", WITHHELD)
def test_what_is_named_is_given(name):
    given_ = exported({**ALLOWED, **WITHHELD}, (name,))
    assert name in given_
    assert set(given_) == {*exported(ALLOWED, ()), name}
    assert list(given_) == sorted(given_)


@pytest.mark.parametrize(
    ("name", "message"),
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
def test_exports_are_names_of_variables_that_are_there(name, message):
    with pytest.raises(CommandError, match=message) as refused:
        exported({"A": "B-secret"}, (name,))
    assert "secret" not in str(refused.value)


NAMES = st.sampled_from(sorted(ALLOWED | WITHHELD)) | st.from_regex(r"[A-Z_][A-Z0-9_]{0,12}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=4, max_size=20)


@given(environment=st.dictionaries(NAMES, VALUES, max_size=8), data=st.data())
def test_no_value_of_a_variable_is_ever_on_a_command_line(environment, data):
    extra = data.draw(st.lists(st.sampled_from(sorted(environment)), max_size=3)) if environment else []
    exports = exported(environment, extra)
    for before in (spec(), spec(MPI5, where=THREE), spec(where=THREE, horovodrun=HOROVODRUN)):
        after = replace(before, exports=exports)
        ours = " ".join([*command.argv(before), *environment])
        for value in environment.values():
            assert value in ours or value not in " ".join(command.argv(after))
        for name in environment.keys() - set(exports):
            assert name not in command.argv(after)
    secret = {name for name in environment if SECRET.search(name)}
    assert not secret & (set(exports) - set(extra))


def test_several_hosts_get_only_what_is_on_the_list():
    inherited = {
        **ALLOWED,
        **WITHHELD,
        "SSH_AUTH_SOCK": "/agent",
        "SLURM_JOB_ID": "7",
        "LC_ALL": "C",
        "OMPI_MCA_x": "1",
    }
    exports = exported(inherited, ("NCCL_DEBUG",))
    ours = {"HVDLAUNCH_PLAN": "{}", "PATH": "/ours"}
    several = launcher_environment(spec(where=THREE, exports=exports), inherited, ours)
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
    assert launcher_environment(spec(exports=exports), inherited, ours) == {**inherited, **ours}


def test_a_rank_sees_its_gpu_by_uuid_and_its_threads_and_networks():
    slot = spec().slots[1]
    everything = rank_environment(slot, interface="eth0", adapters=("mlx5_0", "mlx5_1"), set_by_user=())
    assert everything == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-2222",
        "OMP_NUM_THREADS": "8",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
    }
    plain = rank_environment(slot, interface=None, adapters=(), set_by_user=())
    assert plain == {
        name: everything[name] for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    }


def test_what_the_user_has_set_stays():
    kept = ("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES")
    chosen = rank_environment(spec().slots[0], interface="eth0", adapters=("mlx5_0",), set_by_user=kept)
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-0000"}


def test_a_rank_on_cpus_sees_no_gpu_and_one_without_a_uuid_its_index():
    slot = replace(spec().slots[1], gpu_uuid=None, threads=None)
    assert rank_environment(slot, interface=None, adapters=(), set_by_user=())["CUDA_VISIBLE_DEVICES"] == "2"
    on_cpus = rank_environment(replace(slot, gpu=None), interface=None, adapters=("mlx5_0",), set_by_user=())
    assert on_cpus == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ""}


def test_the_plan_tells_each_rank_its_place():
    started = spec(where=THREE)
    own = [{"CUDA_VISIBLE_DEVICES": slot.gpu_uuid} for slot in started.slots]
    text = plan_json(started, {"h1": "h1.local", "h2.cluster.example": "h2"}, own, {"NCCL_DEBUG": "INFO"})
    plan = json.loads(text)
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
    by_horovodrun = plan_json(
        replace(started, horovodrun=HOROVODRUN), dict.fromkeys(["h1", "h2.cluster.example"]), own, {}
    )
    assert json.loads(by_horovodrun)["launcher"] == "horovodrun, Open MPI 4.1.8"


def test_a_plan_that_no_variable_holds_is_refused():
    started = spec(program=("x" * MAX_PLAN_CHARACTERS,))
    with pytest.raises(CommandError, match="the plan of 2 ranks takes 13"):
        plan_json(started, {"localhost": "here"}, [{}, {}], {})
