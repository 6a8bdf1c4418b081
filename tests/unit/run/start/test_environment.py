import pytest

from launch.errors import CommandError
from launch.run.start.environment import MAX_NAMED, exported, inherited, note_left_behind
from tests.unit.run.start.specs import MPI4, MPI5, THREE, rendered

LISTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_HOME", "TORCH_HOME", "HVDTRAIN_DATA")
LISTED += ("NCCL_DEBUG", "HOROVOD_CYCLE_TIME", "FI_PROVIDER", "UCX_TLS", "HVDLAUNCH_SEED", "HVDLAUNCH_WINDOWS")
ALLOWED = {
    **dict.fromkeys(LISTED, "some value"),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY", "no_proxy"), "http://proxy:3128"),
}
SECRETS = ("HVDTRAIN_TOKEN", "TORCH_API_KEY", "PYTHON_SECRET", "OMP_password", "MKL_AUTH", "HVDTRAIN_CREDENTIALS")
OTHERS = ("HOME", "PATHS", "MY_PATH", "AWS_ACCESS_KEY_ID", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "my_proxy")
OF_A_PROCESS = ("HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_HOSTNAME")
WITHHELD = {
    **dict.fromkeys((*SECRETS, *OTHERS, *OF_A_PROCESS, "HOROVOD_SECRET_KEY", "NCCL_PASSPHRASE"), "a value"),
    **dict.fromkeys(("TORCH_PASSPHRASE", "OMPI_COMM_WORLD_RANK"), "a value"),
    "https_proxy": "http://me:s3cret@proxy:3128",
    "HTTP_PROXY": "me@proxy:3128",
}


def test_ranks_get_what_is_on_the_list_and_no_secret():
    ours = {"HVDLAUNCH_PLAN", "HVDLAUNCH_JOB", "HVDLAUNCH_REPORT"}
    assert set(exported({**ALLOWED, **WITHHELD}, ())) == {*ALLOWED, *ours}
    assert set(exported({}, ())) == ours


@pytest.mark.parametrize("name", ["HVDTRAIN_TOKEN", "MY_PATH", "https_proxy"])
def test_what_is_named_is_given(name):
    given_ = exported({**ALLOWED, **WITHHELD}, (name,))
    assert name in given_
    assert set(given_) == {*exported(ALLOWED, ()), name}
    assert list(given_) == sorted(given_)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A=B-secret", r"^-x 'A': pass only the name of a variable and set it in the environment"),
        ("", r"^-x '': pass only the name"),
        ("-oProxyCommand", r"^-x '-oProxyCommand': pass only the name"),
        ("A\n", r"^-x 'A\\n': pass only the name"),
        ("Ä", r"^-x 'Ä': pass only the name"),
        ("MISSING", r"^-x MISSING: not set in the environment\. Set it, or leave it out\.$"),
    ],
)
def test_exports_are_names_of_variables_that_are_there(name, message):
    with pytest.raises(CommandError, match=message) as refused:
        exported({"A": "B-secret"}, (name,))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("changes", [{}, {"where": THREE}, {"where": THREE, "kind": "horovodrun"}])
@pytest.mark.parametrize("mpi", [MPI4, MPI5])
def test_no_value_of_a_variable_is_ever_on_a_command_line(mpi, changes):
    environment = {name: f"value of {name}" for name in (*ALLOWED, *WITHHELD)}
    exports = exported(environment, ("MY_PATH", "HVDTRAIN_TOKEN"))
    argv = rendered(mpi, exports=exports, environment=environment, **changes).argv
    assert not [name for name, value in environment.items() if value in " ".join(argv)]
    assert not [name for name in environment.keys() - set(exports) if name in argv]


def test_several_hosts_get_only_what_is_on_the_list():
    needed = {"HOME": "a value", "SSH_AUTH_SOCK": "/agent", "SLURM_JOB_ID": "7", "LC_ALL": "C", "OMPI_MCA_x": "1"}
    environment = {**ALLOWED, **WITHHELD, **needed}
    exports = exported(environment, ("MY_PATH",))
    assert inherited(environment, exports, local=False) == {**ALLOWED, **needed, "MY_PATH": "a value"}


def test_one_host_gets_all_but_what_another_launcher_has_set():
    kept = {"PMIX_MCA_gds": "hash", "PMIX_PREFIX": "/opt", "PMI_FD": "5", "SLURM_JOB_ID": "7", "PMIXY": "mine"}
    names = ("PMIX_SECURITY_MODE", "PMIX_RANK", "PMI_RANK", "PMI2_JOBID", "HVDLAUNCH_RANK", "RANK")
    of_a_step = dict.fromkeys(names, "0")
    assert inherited({**kept, **of_a_step}, ("PMI_FD",), local=True) == kept


def test_one_line_names_what_ranks_on_several_hosts_do_not_get():
    noise = ("HOME", "TERM", "LC_ALL", "SSH_AUTH_SOCK", "SSH_CLIENT", "SLURM_JOB_ID", "OMPI_MCA_x", "LS_COLORS", "_")
    noise += ("XDG_SEAT", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_x%%", "SHLVL", *OF_A_PROCESS)
    session = dict.fromkeys(noise, "s3cret")
    environment = {**ALLOWED, **session, "odd\x1bname": "x"}
    assert note_left_behind(environment, exported(environment, ())) is None
    environment |= {"MY_DATA": "s3cret", "WANDB_API_KEY": "s3cret", "HVDTRAIN_TOKEN": "s3cret"}
    environment["https_proxy"] = "http://me:s3cret@proxy:3128"
    note = note_left_behind(environment, exported(environment, ("WANDB_API_KEY",)))
    assert note.startswith("note: HVDTRAIN_TOKEN, MY_DATA, https_proxy (has a password) ")
    assert "-x NAME" in note
    many = {f"MY_{i:02}": "s3cret" for i in range(20)}
    assert f"MY_{MAX_NAMED - 1:02} and {20 - MAX_NAMED} more not passed" in note_left_behind(many, ())
