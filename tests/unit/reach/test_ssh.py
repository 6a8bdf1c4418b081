import pytest

from launch.process import Answer
from launch.reach.ssh import why_not

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
        ("ssh: connect to host h2 port 22: Connection refused\n", "ssh is refused: start sshd there"),
        ("ssh: Could not resolve hostname h2: Name or service not known\n", "unknown host name: correct -H"),
        (CHANGED, "its host key is not the one in known_hosts: if the host was really replaced, `ssh-keygen -R h2`"),
        (UNKNOWN, "its host key is unknown: connect to it once by hand, `ssh h2`"),
        (
            "root@h2: Permission denied (password).\n",
            "ssh asks for a password: copy a key there, with `ssh-copy-id h2`",
        ),
        (
            "Connection timed out during banner exchange\nConnection to 10.0.0.2 port 22 timed out\n",
            "ssh gets no answer",
        ),
        ("ssh: connect to host h2 port 22: Connection timed out\n", "ssh gets no answer"),
        ("Timeout, server h2 not responding.\n", "ssh gets no answer"),
        ("ssh: connect to host h2 port 22: No route to host\n", "no route to it"),
        ("ssh: connect to host h2 port 22: Network is unreachable\n", "its network cannot be reached"),
        ("/venv/python: No module named launch\n", "/venv/python there has no hvdlaunch"),
        (
            "/venv/python: Error while finding module specification (ModuleNotFoundError: No module named 'launch')\n",
            "/venv/python there has no hvdlaunch",
        ),
        ("bash: line 1: cd: /my runs: No such file or directory\n", "it has no folder /my runs"),
        ("sh: 1: cd: can't cd to /my runs\n", "it has no folder /my runs"),
        ("bash: line 1: /venv/python: No such file or directory\n", "it has no /venv/python"),
        ("sh: 1: exec: /venv/python: not found\n", "it has no /venv/python"),
        ("banner\nhvdlaunch: nvidia-smi gave no answer in 10 s\n", "nvidia-smi gave no answer in 10 s"),
        (
            "hvdlaunch: nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found\n",
            "nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found",
        ),
        ("kex_exchange_identification: read: hm\nlast {words}\n", "asked over ssh, it said: last {words}"),
        ("", "asked over ssh, it said: ended with status 255 without a word"),
    ],
)
def test_each_trouble_of_ssh_has_its_line_and_remedy(err, line):
    reason = why_not(Answer(status=255, out="", err=err), host="h2", python="/venv/python", folder="/my runs")
    assert reason.startswith(line)
    assert "\n" not in reason
    assert "{" not in reason.replace("{words}", "")
