import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.supervise.mpirun_output import MpirunOutput

DASHES = b"-" * 74 + b"\n"


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
    "prterun noticed that process rank 0 with PID 10049 on node vm exited on\nsignal 11 (Segmentation fault)."
)
LOST = framed(
    "ORTE has lost communication with a remote daemon.\n\n"
    "  HNP daemon   : [[1594,0],0] on node outside\n"
    "  Remote daemon: [[1594,0],2] on node h2\n\n"
    "This is usually due to either a failure of the TCP network\n"
    "connection to the node, or possibly an internal failure of\n"
    "the daemon itself. We cannot recover from this failure, and\n"
    "therefore will terminate the job."
)
SILENT = b"Timeout, server h2 not responding.\r\n"
CLOSED = b"Connection to h2 closed by remote host.\r\n"
NO_DAEMON = framed(
    "ORTE was unable to reliably start one or more daemons.\n"
    "This usually is caused by:\n\n"
    "* not finding the required libraries and/or binaries on\n"
    "  one or more nodes. Please check your PATH and LD_LIBRARY_PATH\n"
    "  settings, or configure OMPI with --enable-orterun-prefix-by-default\n\n"
    "* lack of authority to execute on one or more specified nodes.\n"
    "  Please verify your allocation and authorities.\n\n"
    "* the inability to write startup files into /tmp (--tmpdir/orte_tmpdir_base).\n"
    "  Please check with your sys admin to determine the correct location to use.\n\n"
    "*  compilation of the orted with dynamic libraries when static are required\n"
    "  (e.g., on Cray). Please check your configure cmd line and consider using\n"
    "  one of the contrib/platform definitions for your system type.\n\n"
    "* an inability to create a connection back to mpirun due to a\n"
    "  lack of common network interfaces and/or no route found between\n"
    "  them. Please check network connectivity (including firewalls\n"
    "  and network routing requirements)."
)
NO_ROUTE = framed(
    "ORTE does not know how to route a message to the specified daemon\n"
    "located on the indicated node:\n\n"
    "  my node:   outside\n"
    "  target node:  h1\n\n"
    "This is usually an internal programming error that should be\n"
    "reported to the developers. In the meantime, a workaround may\n"
    "be to set the MCA param routed=direct on the command line or\n"
    "in your environment. We apologize for the problem."
)
NO_PEER = framed(
    "WARNING: Open MPI failed to TCP connect to a peer MPI process.  This\n"
    "should not happen.\n\n"
    "Your Open MPI job may now hang or fail.\n\n"
    "  Local host: h1\n"
    "  PID:        24\n"
    "  Message:    connect() to 10.73.0.2:1024 failed\n"
    "  Error:      Operation now in progress (115)"
)
PMIX = b"[h1:00018] PMIX ERROR: UNREACHABLE in file src/server/pmix_server.c at line 2198\n"
CONSEQUENCES = NO_DAEMON + NO_ROUTE + NO_PEER + PMIX
REFUSED = b"ssh: connect to host h2 port 22: Connection refused\n"
NO_SLOTS = framed(
    "There are not enough slots available in the system to satisfy the 4\n"
    "slots that were requested by the application:\n\n  /venv/bin/python\n\n"
    "Either request fewer slots for your application, or make more slots\navailable for use."
)
INVALID = framed(
    "WARNING: An invalid value was given for btl_tcp_if_include.  This\nvalue will be ignored.\n\n"
    "  Local host: h1\n  Value:      ens5\n  Message:    Unknown interface name"
)


def fed(*chunks):
    """The story of these chunks, and all that came out."""
    story = MpirunOutput({"h1", "h2"})
    return story, b"".join(map(story.feed, chunks)) + story.flush()


def bytewise(text):
    return [text[i : i + 1] for i in range(len(text))]


@pytest.mark.parametrize("cut", [lambda text: [text], bytewise, lambda text: text.splitlines(keepends=True)])
@pytest.mark.parametrize(
    ("stderr", "rank", "how", "lost"),
    [
        (NONZERO + STATUS_3, 2, "ended with status 3", None),
        (STATUS_3_OF_5, 1, "ended with status 3", None),
        (NONZERO + KILLED, 2, "died of signal 9 (Killed)", None),
        (KILLED_OF_5, 0, "died of signal 11 (Segmentation fault)", None),
        (LOST + SILENT, None, None, "h2"),
        (SILENT, None, None, "h2"),
        (CLOSED, None, None, "h2"),
        (CLOSED + LOST + NO_PEER, None, None, "h2"),
        (CLOSED + NO_DAEMON + NO_PEER, None, None, "h2"),
        (LOST.replace(b"ORTE", b"PRTE"), None, None, "h2"),
        (KILLED + STATUS_3, 2, "died of signal 9 (Killed)", None),
    ],
)
def test_banners_are_understood_and_swallowed_however_they_arrive(stderr, rank, how, lost, cut):
    story, out = fed(*cut(stderr))
    assert (story.rank, story.how, story.lost or story.gone) == (rank, how, lost)
    assert out == b""


def test_what_only_follows_from_a_cause_comes_out_where_no_cause_was_found():
    story, out = fed(REFUSED, NO_DAEMON, NO_ROUTE)
    assert (story.rank, story.lost) == (None, None)
    assert out == REFUSED + NO_DAEMON + NO_ROUTE
    assert fed(CONSEQUENCES)[1] == CONSEQUENCES
    assert fed(CLOSED, CONSEQUENCES)[1] == b""
    assert fed(CONSEQUENCES, KILLED)[1] == b""
    assert fed(REFUSED, CONSEQUENCES, SILENT)[1] == REFUSED


@pytest.mark.parametrize("stderr", [NO_SLOTS, INVALID, INVALID + NO_SLOTS, framed("PRTE is new and strange"), REFUSED])
def test_messages_that_are_not_understood_come_out(stderr):
    story = MpirunOutput({"h1", "h2"})
    out = story.feed(stderr)
    assert out + story.flush() == stderr
    assert len(stderr) - len(out) <= len(DASHES)
    assert fed(*bytewise(stderr))[1] == stderr


def test_banners_among_messages_and_ranks_are_told_apart():
    stderr = INVALID + b"fake orted\n" + NONZERO + b"rank 1: bye\n" + STATUS_3 + INVALID
    for chunks in ([stderr], bytewise(stderr)):
        story, out = fed(*chunks)
        assert story.rank == 2
        assert out == INVALID + b"fake orted\n" + b"rank 1: bye\n" + INVALID


@pytest.mark.parametrize("rulers", [1, 2, 3])
def test_lines_of_dashes_of_ranks_do_not_hide_a_banner(rulers):
    stderr = b"loss\n".join([DASHES] * rulers)
    story, out = fed(stderr + NONZERO + STATUS_3)
    assert (story.rank, story.how) == (2, "ended with status 3")
    assert out == stderr


@pytest.mark.parametrize(
    "stderr",
    [b"epoch 1:  10%|#  \r", b"[=====>   ] ", b"- item", b"Waiting ", b"C", b"\x1b[2K", b"Connecting\r", b"Time 3"],
)
def test_a_line_that_is_not_whole_comes_out_at_once(stderr):
    for before in (b"", DASHES):
        story = MpirunOutput({"h1", "h2"})
        out = story.feed(before) + story.feed(stderr)
        if stderr == b"C":  # it could become ssh's Connection to
            out += story.feed(b"lass\r")
            assert out == before + stderr + b"lass\r"
        else:
            assert out == before + stderr


@pytest.mark.parametrize("launcher", [b"mpirun", b"prterun"])
def test_what_mpirun_says_of_our_own_signals_is_swallowed(launcher):
    stderr = launcher + b": Forwarding signal 10 to job\n"
    for chunks in ([stderr], bytewise(stderr), [stderr + b"loss 0.5\n"]):
        assert fed(*chunks)[1] == b"".join(chunks).removeprefix(stderr)
    assert fed(b"mpirun: Forwarding nothing\n")[1] == b"mpirun: Forwarding nothing\n"


@pytest.mark.parametrize("plm", [b"rsh", b"ssh"])
def test_what_mpirun_says_of_a_busy_machine_is_swallowed(plm):
    line = b"[outside:00024] plm:%s: Warning: setpgid(31,31) failed in parent with errno=Permission denied(13)\n" % plm
    assert fed(line + b"mine\n")[1] == b"mine\n"


def test_a_long_message_that_never_ends_comes_out():
    stderr = DASHES + b"mpirun is\n" + b"talkative\n" * 60
    story = MpirunOutput({"h1", "h2"})
    assert stderr.startswith(out := story.feed(stderr))
    assert out.count(b"\n") == 62


PIECES = st.one_of(
    st.sampled_from(
        [DASHES, b"-" * 80, b"-", b"\r", b"\n", b"\r\n", b"Conn", b"Connection to ", b"Timeout", b"\x00\xff"]
    ),
    st.sampled_from(
        [b"mpirun ", b"ORTE ", b"Primary job ", b"WARNING: Open MPI ", b"\x85", b"\xe2\x80\xa8", b"\x0b\x0c\x1c"]
    ),
    st.binary(max_size=8),
)


def chunked(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces=st.lists(PIECES, max_size=20), data=st.data())
def test_what_ranks_print_comes_out_unchanged_and_in_order(pieces, data):
    stderr = b"".join(pieces)
    story = MpirunOutput({"h1", "h2"})
    out = b""
    for heard in (chunks := chunked(data, stderr)):
        out += story.feed(heard)
        assert stderr.startswith(out)
    assert out + story.flush() == stderr
    assert (story.rank, story.lost) == (None, None)
    assert b"".join(chunks) == stderr


LINES = st.sampled_from([b"loss 0.5\n", b"\xff\x00\n", b"- a list\n", b"\n", b"10%\r20%\r\n", DASHES])


@given(
    before=st.lists(LINES, max_size=4),
    between=st.lists(LINES, max_size=4),
    cause=st.sampled_from([STATUS_3, STATUS_3_OF_5, KILLED, LOST, CLOSED, SILENT]),
    after=st.lists(LINES, max_size=4),
    data=st.data(),
)
def test_what_ranks_print_around_banners_comes_out_without_them(before, between, cause, after, data):
    first, second, third = map(b"".join, (before, between, after))
    story, out = fed(*chunked(data, first + NONZERO + second + cause + third))
    assert out == first + second + third
    assert (story.rank is None) == ((story.lost or story.gone) is not None)


def test_what_a_ranks_own_ssh_says_is_the_ranks_and_no_lost_host():
    story = MpirunOutput({"h1", "h2"})
    stderr = b"Connection to data.example closed by remote host.\n"
    assert story.feed(stderr) + story.flush() == stderr
    assert (story.lost, story.gone) == (None, None)


def test_what_srun_says_of_a_cluster_that_binds_nothing_is_swallowed():
    stderr = b"srun: cluster configuration lacks support for cpu binding\n"
    for chunks in ([stderr], bytewise(stderr), [stderr + b"srun: mine\n"]):
        assert fed(*chunks)[1] == b"".join(chunks).removeprefix(stderr)
