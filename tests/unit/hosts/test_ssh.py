import pytest

from launch.errors import HostError
from launch.hosts import srun, ssh
from launch.hosts.ssh import UNANSWERED, Ssh, agent_of, explain_failure
from launch.machine.mpi import from_environment
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


THREAD = "Current thread 0x7f (most recent call first):"
TASK = "srun: error: h2: task 0"
SSH, SHELL, PROGRAM = 255, 127, 1
NOISE = """\
/etc/profile.d/site.sh: line 4: cd: /my runs2: No such file or directory
/home/me/.bashrc: line 9: /usr/bin/modulecmd: error while loading shared libraries: libtcl8.6.so: not found
Error processing line 1 of /site/x.pth: ModuleNotFoundError: No module named 'x', Permission denied (publickey)
kinit: ssh: Connection timed out; Connection refused, Invalid job id
"""


@pytest.mark.parametrize(
    ("status", "err", "line"),
    [
        (SSH, "ssh: connect to host h2 port 22: Connection refused\n", "connection refused. Start sshd on h2"),
        (SSH, "ssh: Could not resolve hostname h2: Name or service not known\n", "unknown host name. Correct -H"),
        (SSH, "ssh: Could not resolve hostname h2: Temporary failure in name resolution\n", "the name server does not"),
        (SSH, CHANGED, "its host key has changed. If the host was really replaced, run `ssh-keygen -R h2`"),
        (SSH, UNKNOWN, "its host key is unknown. Run `ssh h2`"),
        (SSH, "root@h2: Permission denied (publickey,password).\n", "ssh asks for a password. Copy your key: `ssh-cop"),
        (SSH, "root@h2: Permission denied (publickey).\n", "its sshd accepts none of your keys"),
        (SSH, "Received disconnect from ::1: Too many authentication failures\r\nBye\r\n", "ssh offers too many keys"),
        (
            SSH,
            "NOTICE: the system is going down on Friday\nme@h2: Permission denied (publickey).\n",
            "its sshd accepts none of",
        ),
        (SSH, '"System is going down."\nConnection closed by 10.0.0.2 port 22\n', "it admits no users while it starts"),
        (SSH, "Access denied by pam_slurm_adopt\nConnection closed by ::1 port 22\n", "it admits only users with a Sl"),
        (SSH, "Unable to negotiate with ::1 port 22: no matching host key type found.\n", "ssh and the sshd of h2 sha"),
        (SSH, "kex_exchange_identification: read: Connection reset by peer\n", "its sshd closed the connection"),
        (SSH, "Connection timed out during banner exchange\nConnection to ::1 port 22 timed out\n", "ssh to h2 timed"),
        (SSH, "ssh: connect to host h2 port 22: No route to host\n", "no route to h2"),
        (SSH, "hm\nlast {words}\n", "the probe failed: last {words}"),
        (SSH, "", "the probe failed: ended with status 255 without a word"),
        (SHELL, "bash: line 1: /venv/python: No such file or directory\n", "/venv/python does not exist"),
        (SHELL, "zsh:1: no such file or directory: /venv/python\n", "/venv/python does not exist"),
        (SHELL, "/venv/python: error while loading shared libraries: libz.so.1: cannot open\n", "libz.so.1, a library"),
        (126, "sh: 1: exec: /venv/python: Permission denied\n", "/venv/python may not be executed on h2"),
        (126, "bash: /venv/python: cannot execute binary file: Exec format error\n", "/venv/python is built for anoth"),
        (PROGRAM, "bash: line 1: cd: /my runs: No such file or directory\n", "/my runs does not exist on h2"),
        (2, "sh: 1: cd: can't cd to /my runs\n", "/my runs does not exist on h2"),
        (PROGRAM, "bash: line 1: cd: /my runs: Stale file handle\n", "/my runs cannot be entered on h2"),
        (PROGRAM, "/venv/python: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x)\n", "its system is ol"),
        (PROGRAM, "/venv/python: Error (ModuleNotFoundError: No module named 'launch')\n", "/venv/python cannot impor"),
        (PROGRAM, f"ModuleNotFoundError: No module named 'encodings'\n\n{THREAD}\n", "/venv/python does not find its"),
        (2, "unknown option -P\nusage: /venv/python [option] ...\n", "/venv/python is older than Python 3.11"),
        (PROGRAM, "TypeError: main() takes 3 positional arguments but 5 were given\n", "it has an older version of th"),
        (PROGRAM, "PermissionError: [Errno 13] Permission denied: '/venv/x.py'\n", "this user may not read /venv/x.py"),
        (PROGRAM, "OSError: [Errno 116] Stale file handle\n", "its disk or a shared file system does not work"),
        (PROGRAM, "hvdlaunch: nvidia-smi gave no answer in 10 s\n", "nvidia-smi gave no answer in 10 s"),
        (PROGRAM, "hvdlaunch: error: nvidia-smi failed and said: Permission denied, lib not found\n", "nvidia-smi fai"),
        (PROGRAM, f"slurmstepd: error: Detected 1 oom_kill event\n{TASK}: Out Of Memory\n", "its memory is used up"),
        (PROGRAM, "/my runs: No such file or directory.\n", "/my runs does not exist on h2"),  # tcsh
        (PROGRAM, "/my runs: Permission denied.\n", "/my runs cannot be entered on h2"),
        (PROGRAM, "Your password has expired.\nPassword change required but no TTY available.\n", "your password ther"),
        (SSH, "Your account has expired\nConnection closed by ::1 port 22\n", "your account there has expired"),
        (137, "Killed\n", "the probe was killed by SIGKILL"),
        (-11, "", "the probe was killed by SIGSEGV"),
        (PROGRAM, "srun: error: Requested node configuration is not available\n", "it is not a node of this Slurm all"),
        (PROGRAM, "srun: error: Invalid node name specified\n", "it is not a node of this Slurm allocation. Name one"),
        (PROGRAM, "srun: error: Unable to create step for job 7: Insufficient GRES\n", "this job has fewer GPUs there"),
        (SHELL, f"sh: 1: exec: /venv/python: not found\n{TASK}: Exited with exit code 127\n", "/venv/python does not"),
    ],
)
@pytest.mark.parametrize("noise", ["", NOISE])
def test_each_trouble_has_its_reason_and_remedy_whatever_a_profile_prints_before(status, err, line, noise):
    answer = Answer(status=status, out="", err=noise + err if err else "")
    reason = explain_failure(answer, host="h2", python="/venv/python", folder="/my runs")
    assert reason.startswith(line)
    assert "\n" not in reason
    assert "{" not in reason.replace("{words}", "")


@pytest.fixture
def answered(monkeypatch):
    """What ssh is made to answer, and the words with which it was started."""
    known = {"answer": Answer(status=0, out="motd\n\033]0;h2\amark 7\n", err=""), "words": []}  # a terminal's title

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


def test_no_silence_that_is_shorter_ends_a_link():
    for silence_s, every_s in ((30, 8), (1, 1), (4.5, 2)):
        ssh = Ssh(silence_s=silence_s)
        assert ssh.sign_every_s == every_s
        assert f"ServerAliveInterval={every_s}" in ssh.arguments
        assert every_s * UNANSWERED >= silence_s


def test_the_text_of_a_failure_is_kept_unless_the_line_quotes_it(answered):
    answered["answer"] = Answer(status=255, out="", err=f"Welcome\n{UNKNOWN}")
    with pytest.raises(HostError, match=r"^host h2: its host key is unknown") as refused:
        Ssh().ask("h2", ["python"], "/", mark="mark ", timeout_s=5)
    assert refused.value.details == ("Welcome", *UNKNOWN.splitlines())
    answered["answer"] = Answer(status=2, out="", err="banner\nhvdlaunch: no GPU\n")
    with pytest.raises(HostError, match=r"^host h2: no GPU$") as refused:
        Ssh().ask("h2", ["python"], "/", mark="mark ", timeout_s=5)
    assert refused.value.details == ()
    answered["answer"] = Answer(status=1, out="This account is not available.\nBye.\n", err="")
    with pytest.raises(HostError, match=r"^host h2: the probe failed: Bye.$") as refused:
        Ssh().ask("h2", ["python"], "/", mark="mark ", timeout_s=5)
    assert refused.value.details == ("This account is not available.", "Bye.")


def test_an_agent_of_open_mpi_reaches_hosts_without_the_options_of_ssh(answered):
    ssh = Ssh(agent=("/opt/enter", "-q"), options=("Port=2222",))
    assert ssh.reaches("h2")
    assert answered["words"] == ["/opt/enter", "-q", "-o", "Port=2222", "h2", "true"]
    answered["answer"] = Answer(status=255, out="", err="")
    assert not ssh.reaches("h2")
    assert "BatchMode=yes" in Ssh(agent=("/usr/local/bin/ssh", "-4")).arguments


RSH = "OMPI_MCA_plm_rsh_agent"


@pytest.mark.parametrize(
    ("environment", "options", "agent"),
    [
        ({}, [], ("ssh",)),
        ({RSH: " : "}, [], ("ssh",)),
        ({RSH: "missing -a : there -b c : later"}, [], ("there", "-b", "c")),
        ({RSH: "missing"}, [], ("missing",)),
        ({"PRTE_MCA_plm_ssh_agent": "there"}, [], ("there",)),
        ({"OMPI_MCA_pls_rsh_agent": "there"}, [], ("there",)),
        ({RSH: "ssh : rsh : false"}, [], ("ssh",)),
        # Nodes of an allocation, unless the user says ssh.
        ({"SLURM_JOB_ID": "7"}, [], srun.AGENT),
        ({"SLURM_JOB_ID": ""}, [], ("ssh",)),
        ({"SLURM_JOB_ID": "7"}, ["Port=2222"], ("ssh",)),
        ({"SLURM_JOB_ID": "7", RSH: "ssh -4"}, [], ("ssh", "-4")),
        ({"SLURM_JOB_ID": "7", RSH: "ssh : rsh : false"}, [], srun.AGENT),  # Open MPI's own
    ],
)
def test_hosts_are_reached_by_the_program_that_open_mpi_takes_or_by_srun(monkeypatch, environment, options, agent):
    monkeypatch.setattr(ssh, "find", lambda program: program if program != "missing" else None)
    monkeypatch.setattr(srun, "find", lambda program: program)
    assert agent_of(from_environment(environment), environment, options) == agent
    monkeypatch.setattr(srun, "find", lambda _: None)
    assert agent_of(from_environment(environment), environment, options) != srun.AGENT
