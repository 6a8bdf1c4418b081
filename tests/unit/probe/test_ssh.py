import pytest

from launch.errors import HostError
from launch.probe import srun, ssh
from launch.probe.ssh import UNANSWERED, Ssh, agent_of, explain_failure
from launch.process import Answer

# The texts of OpenSSH 9.2 and of bash.
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for h2 has changed and you have requested strict checking.
Host key verification failed.
"""
UNKNOWN = "No ED25519 host key is known for h2 and you have requested strict checking.\nHost key verification failed.\n"


@pytest.mark.parametrize(
    ("err", "line"),
    [
        ("ssh: connect to host h2 port 22: Connection refused\n", "connection refused. Start sshd on h2"),
        ("ssh: Could not resolve hostname h2: Name or service not known\n", "unknown host name. Correct -H"),
        (CHANGED, "its host key has changed. If the host was really replaced, run `ssh-keygen -R h2`"),
        (UNKNOWN, "its host key is unknown. Run `ssh h2`"),
        ("root@h2: Permission denied (password).\n", "ssh asks for a password. Copy your key: `ssh-copy-id h2`"),
        ("Connection timed out during banner exchange\nConnection to 10.0.0.2 port 22 timed out\n", "ssh to h2 timed"),
        ("ssh: connect to host h2 port 22: No route to host\n", "no route to h2"),
        (
            "/venv/python: Error while finding module specification (ModuleNotFoundError: No module named 'launch')\n",
            "/venv/python cannot import hvdlaunch",
        ),
        ("TypeError: main() takes 3 positional arguments but 5 were given\n", "it has an older version of the project"),
        ("bash: line 1: cd: /my runs: No such file or directory\n", "/my runs does not exist on h2"),
        ("bash: line 1: /venv/python: No such file or directory\n", "/venv/python does not exist"),
        ("banner\nhvdlaunch: nvidia-smi gave no answer in 10 s\n", "nvidia-smi gave no answer in 10 s"),
        (
            "hvdlaunch: nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found\n",
            "nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found",
        ),
        ("kex_exchange_identification: read: hm\nlast {words}\n", "the probe failed: last {words}"),
        ("", "the probe failed: ended with status 255 without a word"),
    ],
)
def test_each_trouble_of_ssh_has_its_line_and_remedy(err, line):
    reason = explain_failure(Answer(status=255, out="", err=err), host="h2", python="/venv/python", folder="/my runs")
    assert reason.startswith(line)
    assert "\n" not in reason
    assert "{" not in reason.replace("{words}", "")


@pytest.fixture
def answered(monkeypatch):
    """What ssh is made to answer, and the words with which it was started."""
    known = {"answer": Answer(status=0, out="motd\nmark 7\n", err=""), "words": []}

    def ask(words, *, timeout_s):
        known["words"] = words
        return known["answer"]

    monkeypatch.setattr(ssh, "ask", ask)
    return known


def test_a_host_is_asked_strictly_and_the_users_options_come_first(answered):
    ssh = Ssh(options=("StrictHostKeyChecking=accept-new", "Port=2222"))
    assert ssh.ask("h2", ["python", "-m", "x y"], "/my runs", mark="mark ", timeout_s=5) == "7"
    assert answered["words"][:5] == ["ssh", "-o", "StrictHostKeyChecking=accept-new", "-o", "Port=2222"]
    assert answered["words"][5:-2] == [
        *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=5"),
        *("-o", "ServerAliveInterval=8", "-o", "ServerAliveCountMax=4"),
    ]
    assert answered["words"][-2:] == ["h2", "cd '/my runs' && exec python -m 'x y'"]


@pytest.mark.parametrize(("silence_s", "every_s"), [(30, 8), (1, 1), (4.5, 2)])
def test_no_silence_that_is_shorter_ends_a_link(silence_s, every_s):
    ssh = Ssh(silence_s=silence_s)
    assert ssh.sign_every_s == every_s
    assert f"ServerAliveInterval={every_s}" in ssh.arguments
    assert every_s * UNANSWERED >= silence_s


def test_the_whole_text_of_a_refused_login_is_kept_and_none_of_a_program_there(answered):
    answered["answer"] = Answer(status=255, out="", err=f"Welcome\n{UNKNOWN}")
    with pytest.raises(HostError, match=r"^host h2: its host key is unknown") as refused:
        Ssh().ask("h2", ["python"], "/", mark="mark ", timeout_s=5)
    assert refused.value.details == ("Welcome", *UNKNOWN.splitlines())
    answered["answer"] = Answer(status=2, out="", err="banner\nhvdlaunch: no GPU\n")
    with pytest.raises(HostError, match=r"^host h2: no GPU$") as refused:
        Ssh().ask("h2", ["python"], "/", mark="mark ", timeout_s=5)
    assert refused.value.details == ()


def test_an_agent_of_open_mpi_reaches_hosts_without_the_options_of_ssh(answered):
    ssh = Ssh(agent=("/opt/enter", "-q"), options=("Port=2222",))
    assert ssh.reaches("h2")
    assert answered["words"] == ["/opt/enter", "-q", "-o", "Port=2222", "h2", "true"]
    answered["answer"] = Answer(status=255, out="", err="")
    assert not ssh.reaches("h2")
    assert "BatchMode=yes" in Ssh(agent=("/usr/local/bin/ssh", "-4")).arguments


@pytest.mark.parametrize(
    ("environment", "agent"),
    [
        ({}, ("ssh",)),
        ({"OMPI_MCA_plm_rsh_agent": " : "}, ("ssh",)),
        ({"OMPI_MCA_plm_rsh_agent": "missing -a : there -b c : later"}, ("there", "-b", "c")),
        ({"OMPI_MCA_plm_rsh_agent": "missing"}, ("missing",)),
        ({"PRTE_MCA_plm_ssh_agent": "there"}, ("there",)),
    ],
)
def test_hosts_are_reached_by_the_program_that_open_mpi_takes(monkeypatch, environment, agent):
    monkeypatch.setattr(ssh, "find", lambda program: program if program != "missing" else None)
    assert agent_of(environment, []) == agent


@pytest.mark.parametrize(
    ("environment", "options", "agent"),
    [
        ({"SLURM_JOB_ID": "7"}, [], srun.AGENT),
        ({"SLURM_JOB_ID": ""}, [], ("ssh",)),
        ({"SLURM_JOB_ID": "7"}, ["Port=2222"], ("ssh",)),
        ({"SLURM_JOB_ID": "7", "OMPI_MCA_plm_rsh_agent": "ssh -4"}, [], ("ssh", "-4")),
    ],
)
def test_nodes_of_an_allocation_are_reached_by_srun_unless_the_user_says_ssh(monkeypatch, environment, options, agent):
    monkeypatch.setattr(ssh, "find", lambda program: program)
    monkeypatch.setattr(srun, "find", lambda program: program)
    assert agent_of(environment, options) == agent
    monkeypatch.setattr(srun, "find", lambda _: None)
    assert agent_of(environment, options) != srun.AGENT
