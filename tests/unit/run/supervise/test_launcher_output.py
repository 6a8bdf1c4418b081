import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.run.start.launchers.openmpi import MESSAGES
from launch.run.start.launchers.srun import Srun
from launch.run.supervise.launcher_output import LauncherOutput

DASHES = b"-" * 74 + b"\n"
SRUN = Srun.messages


def framed(text):
    return DASHES + text.encode() + b"\n" + DASHES


# What Open MPI 4.1.8 and 5.0 print, and ssh under them.
NONZERO = framed(
    "Primary job  terminated normally, but 1 process returned\n"
    "a non-zero exit code. Per user-direction, the job has been aborted."
)
STATUS_3 = framed(
    "mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    "the job to be terminated. The first process to do so was:\n\n"
    "  Process name: [[1594,1],2]\n"
    "  Exit code:    3"
)
STATUS_3_OF_5 = framed(
    "prterun detected that one or more processes exited with non-zero status,\n"
    "thus causing the job to be terminated. The first process to do so was:\n\n"
    "   Process name: [prterun-vm-10042@1,1]\n"
    "   Exit code:    3"
)
KILLED = framed("mpirun noticed that process rank 2 with PID 23 on node h2 exited on signal 9 (Killed).")
KILLED_OF_5 = framed(
    "prterun noticed that process rank 0 with PID 9 on node vm exited on\nsignal 11 (Segmentation fault)."
)
LOST = framed(
    "ORTE has lost communication with a remote daemon.\n\n"
    "  HNP daemon   : [[1594,0],0] on node outside\n"
    "  Remote daemon: [[1594,0],2] on node h2\n\n"
    "This is usually due to either a failure of the TCP network"
)
SILENT = b"Timeout, server h2 not responding.\r\n"
CLOSED = b"Connection to h2 closed by remote host.\r\n"
NO_DAEMON = framed(
    "ORTE was unable to reliably start one or more daemons.\n"
    "This usually is caused by:\n\n"
    "* not finding the required libraries and/or binaries on\n"
    "  one or more nodes. Please check your PATH and LD_LIBRARY_PATH"
)
NO_ROUTE = framed(
    "ORTE does not know how to route a message to the specified daemon\n"
    "located on the indicated node:\n\n"
    "  my node:   outside\n"
    "  target node:  h1"
)
NO_PEER = framed(
    "WARNING: Open MPI failed to TCP connect to a peer MPI process.  This\n"
    "should not happen.\n\n"
    "  Local host: h1\n"
    "  Message:    connect() to 10.73.0.2:1024 failed"
)
PMIX = b"[h1:00018] PMIX ERROR: UNREACHABLE in file src/server/pmix_server.c at line 2198\n"
CONSEQUENCES = NO_DAEMON + NO_ROUTE + NO_PEER + PMIX
REFUSED = b"ssh: connect to host h2 port 22: Connection refused\n"
NO_SLOTS = framed(
    "There are not enough slots available in the system to satisfy the 4\n"
    "slots that were requested by the application:\n\n  /venv/bin/python"
)
ABORTED = b"srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
ABORTED += b"slurmstepd-h1: error: *** STEP 7.0 ON h1 CANCELLED AT 2026-01-02T03:04:05 ***\n"
CRASHED = b"srun: error: h1: task 1: Segmentation fault (core dumped)\n"
ABORT = framed("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n\nNOTE: invoking")
ABORT_OF_5 = framed("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[1,1],1]\n  Errorcode: 1")
OUT_OF_MEMORY = b"srun: error: h1: task 1: Out Of Memory\nsrun: error: h1: task 0: Killed\n"
INVALID = framed("WARNING: An invalid value was given for btl_tcp_if_include.  This\nvalue will be ignored.")


def shown(story, chunk):
    return b"".join(text for _, text in story.feed(chunk))


def fed(*chunks, messages=MESSAGES):
    """The story of these chunks, and all that came out."""
    story = LauncherOutput(messages, {"h1", "h2"})
    return story, b"".join(shown(story, chunk) for chunk in chunks) + story.flush()


def bytewise(text):
    return [text[i : i + 1] for i in range(len(text))]


@pytest.mark.parametrize("cut", [lambda text: [text], bytewise])
@pytest.mark.parametrize(
    ("messages", "stderr", "rank", "how", "lost"),
    [
        (MESSAGES, NONZERO + STATUS_3, 2, "ended with status 3", None),
        (MESSAGES, STATUS_3_OF_5, 1, "ended with status 3", None),
        (MESSAGES, KILLED + STATUS_3, 2, "died of signal 9 (Killed)", None),
        (MESSAGES, KILLED_OF_5, 0, "died of signal 11 (Segmentation fault)", None),
        (MESSAGES, SILENT, None, None, "h2"),
        (MESSAGES, CLOSED + NO_DAEMON + NO_PEER + LOST, None, None, "h2"),
        (MESSAGES, LOST.replace(b"ORTE", b"PRTE"), None, None, "h2"),
        (SRUN, b"srun: error: h2: task 2: Exited with exit code 3\n" + ABORTED, 2, "ended with status 3", None),
        (SRUN, b"srun: error: h1: tasks 0-1: Killed\n" + ABORTED, 0, "died of signal 9 (Killed)", None),
        (SRUN, CRASHED + b"srun: error: h2: task 2: Killed\n", 1, "died of signal 11 (Segmentation fault)", None),
        (SRUN, b"srun: error: Node failure on h2\n" + ABORTED, None, None, "h2"),
        (SRUN, OUT_OF_MEMORY, 1, "died of signal 9 (Out Of Memory)", None),
        (MESSAGES, ABORT, 1, "ended with status 1", None),
        (MESSAGES, ABORT_OF_5, 1, "ended with status 1", None),
    ],
)
def test_messages_are_understood_and_swallowed_however_they_arrive(*, messages, stderr, rank, how, lost, cut):
    story, out = fed(*cut(b"loss 0.5\n" + stderr), messages=messages)
    assert (story.rank, story.how, story.lost or story.gone) == (rank, how, lost)
    assert out == b"loss 0.5\n"


@pytest.mark.parametrize(
    ("messages", "stderr"), [(MESSAGES, KILLED_OF_5), (SRUN, b"srun: error: h1: task 0: Killed\n")]
)
def test_a_message_after_a_progress_bar_is_understood(messages, stderr):
    story, out = fed(b"\r 45%|####", stderr, messages=messages)
    assert (story.rank, out) == (0, b"\r 45%|####")


def test_what_only_follows_from_a_cause_comes_out_where_no_cause_was_found():
    assert fed(REFUSED, CONSEQUENCES)[1] == REFUSED + CONSEQUENCES
    assert fed(CLOSED, CONSEQUENCES)[1] == b""
    assert fed(CONSEQUENCES, KILLED)[1] == b""
    assert fed(REFUSED, CONSEQUENCES, SILENT)[1] == REFUSED


def test_what_srun_says_of_a_step_that_could_not_start_comes_out():
    refused = b"srun: error: Unable to create step for job 7: Requested nodes are busy\n"
    assert fed(refused + ABORTED, messages=SRUN)[1] == refused + ABORTED


@pytest.mark.parametrize("stderr", [NO_SLOTS, INVALID + NO_SLOTS, framed("PRTE is new and strange"), REFUSED])
def test_messages_that_are_not_understood_come_out(stderr):
    story = LauncherOutput(MESSAGES, {"h1", "h2"})
    out = shown(story, stderr)
    assert out + story.flush() == stderr
    assert len(stderr) - len(out) <= len(DASHES)


@pytest.mark.parametrize("before", [b"", DASHES])
@pytest.mark.parametrize("stderr", [b"epoch 1:  10%|#  \r", b"- item", b"Waiting ", b"Connecting\r", b"Time 3"])
def test_a_line_that_is_not_whole_comes_out_at_once(before, stderr):
    assert shown(LauncherOutput(MESSAGES, set()), before + stderr) == before + stderr


def test_remarks_of_launchers_about_themselves_are_swallowed():
    for remark in (
        b"mpirun: Forwarding signal 10 to job\n",
        b"prterun: Forwarding signal 10 to job\n",
        b"[outside:00024] plm:rsh: Warning: setpgid(31,31) failed in parent with errno=Permission denied(13)\n",
        b"srun: cluster configuration lacks support for cpu binding\n",
    ):
        assert fed(remark + b"loss 0.5\n")[1] == b"loss 0.5\n"


PIECES = st.one_of(
    st.sampled_from([DASHES, b"-" * 80, b"-", b"\r", b"\n", b"\r\n", b"Connection to ", b"Timeout", b"\x00\xff"]),
    st.sampled_from([b"mpirun ", b"ORTE ", b"WARNING: Open MPI ", b"\x85", b"\xe2\x80\xa8", b"\x0b\x0c\x1c"]),
    st.binary(max_size=8),
)


def chunked(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=40)
@given(pieces=st.lists(PIECES, max_size=20), data=st.data())
def test_what_ranks_print_comes_out_unchanged_and_in_order(pieces, data):
    stderr = b"".join(pieces)
    story = LauncherOutput(MESSAGES, {"h1", "h2"})
    out = b""
    for heard in chunked(data, stderr):
        out += shown(story, heard)
        assert stderr.startswith(out)
    assert out + story.flush() == stderr
    assert (story.rank, story.lost) == (None, None)


def test_what_a_ranks_own_ssh_says_is_the_ranks_and_no_lost_host():
    stderr = b"Connection to data.example closed by remote host.\n"
    story, out = fed(stderr)
    assert (out, story.lost, story.gone) == (stderr, None, None)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marked_lines_are_those_of_standard_output(size):
    """However they are cut; a mark within a line is the program's."""
    text = b"[0] error\n\x1f[0] a\r\n\x1f[1] b \x1f\n\n[1] \x1f\n\x1f[0] end"
    story, parts = LauncherOutput(MESSAGES, set()), {True: b"", False: b""}
    for at in range(0, len(text), size):
        for is_out, part in story.feed(text[at : at + size]):
            parts[is_out] += part
    assert parts == {True: b"[0] a\r\n[1] b \x1f\n[0] end", False: b"[0] error\n\n[1] \x1f\n"}
