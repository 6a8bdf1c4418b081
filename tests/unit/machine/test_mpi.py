import pytest

from launch.machine import mpi
from launch.machine.mpi import Mpi, parse_mpi
from launch.process import Answer


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """An installation of Open MPI 5 in tmp_path/mpi, and its user's home."""
    etc, home = tmp_path / "mpi/etc", tmp_path / "home"
    for folder in (etc, home / ".openmpi", home / ".prte"):
        folder.mkdir(parents=True)
    mine = home / ".openmpi/mca-params.conf"
    answers = {
        "ompi_info": f"mca:mca:base:param:mca_base_param_files:value:{mine},{etc}/openmpi-mca-params.conf\n"
        f"mca:mca:base:param:mca_base_override_param_file:value:{etc}/openmpi-mca-params-override.conf\n",
        "prte_info": f"              Sysconfdir: {etc}\n",
    }

    def ask(argv, *, timeout_s, env):
        assert (env["HOME"], env["OPAL_PREFIX"]) == (str(home), str(tmp_path / "mpi"))
        return Answer(status=0, out=answers[argv[0].rpartition("/")[2]], err="")

    monkeypatch.setattr(mpi, "ask", ask)
    monkeypatch.setattr(mpi.os, "access", lambda *_: True)
    return home


def parameters_of(tmp_path):
    found = mpi.from_files(str(tmp_path / "mpi/bin/mpirun"), {"HOME": str(tmp_path / "home")})
    return [(one.name, one.value, one.where.removeprefix(f"{tmp_path}/"), one.of_prrte) for one in found]


def test_the_files_of_open_mpi_set_what_the_user_wrote_with_file_and_line(tmp_path, home):
    (home / ".openmpi/mca-params.conf").write_text(
        "# btl = self\n\n  btl_tcp_if_exclude =lo,docker0 \nbtl=tcp\nbtl=self\n"
    )
    (tmp_path / "mpi/etc/openmpi-mca-params.conf").write_text("plm_rsh_agent = ssh : rsh : false\n")
    (home / ".prte/mca-params.conf").write_text("prte_default_hostfile = hf\n")
    assert parameters_of(tmp_path) == [
        ("prte_default_hostfile", "hf", "home/.prte/mca-params.conf:1", True),
        ("btl_tcp_if_exclude", "lo,docker0", "home/.openmpi/mca-params.conf:3", False),
        ("btl", "self", "home/.openmpi/mca-params.conf:5", False),
        ("plm_rsh_agent", "ssh : rsh : false", "mpi/etc/openmpi-mca-params.conf:1", False),
    ]


def test_a_file_that_cannot_be_read_sets_nothing(tmp_path, home):
    (home / ".openmpi/mca-params.conf").write_bytes(b"btl = \xff\n")
    (home / ".prte/mca-params.conf").mkdir()
    assert parameters_of(tmp_path) == []


def test_the_first_that_is_not_empty_counts():
    found = mpi.from_environment({"OMPI_MCA_a": "1", "PRTE_MCA_b": "", "PRTE_MCA_c": "2", "XOMPI_MCA_d": "3"})
    assert [str(one) for one in found] == ["PRTE_MCA_b=", "PRTE_MCA_c=2", "OMPI_MCA_a=1"]
    assert mpi.first(found, ("a", "c")) == found[1]
    assert mpi.first(found, ("b", "d")) is None


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI", (4, 1, 8)),
        ("HYDRA build details:\n    Version:                    4.2.1\n    CC: gcc 12.2\n", "MPICH", (4, 2, 1)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\nCopyright\n", "Intel MPI", (2021, 9)),
    ],
)
def test_an_mpi_says_what_it_is(text, name, version):
    assert parse_mpi("/bin/mpirun", text) == Mpi(path="/bin/mpirun", name=name, version=version)


@pytest.mark.parametrize("text", ["", "mpirun: command not found", "Version: 7", "mpirun (Open MPI)"])
def test_what_is_no_mpi_is_none(text):
    assert parse_mpi("/bin/mpirun", text) is None
