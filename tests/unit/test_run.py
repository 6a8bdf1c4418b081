import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import run
from launch.placement import place
from launch.run import Story, explain, first_error, read_report
from tests.unit.machines import hosts, machine

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


def told(*chunks):
    """The story of these chunks, and all that came out."""
    story = Story({"h1", "h2"})
    return story, b"".join(map(story.hear, chunks)) + story.rest()


def bytewise(text):
    return [text[i : i + 1] for i in range(len(text))]


@pytest.mark.parametrize("cut", [lambda text: [text], bytewise, lambda text: text.splitlines(keepends=True)])
@pytest.mark.parametrize(
    ("said", "rank", "how", "lost"),
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
def test_banners_are_understood_and_swallowed_however_they_arrive(said, rank, how, lost, cut):
    story, out = told(*cut(said))
    assert (story.rank, story.how, story.lost or story.gone) == (rank, how, lost)
    assert out == b""


def test_what_only_follows_from_a_cause_comes_out_where_no_cause_was_found():
    story, out = told(REFUSED, NO_DAEMON, NO_ROUTE)
    assert (story.rank, story.lost) == (None, None)
    assert out == REFUSED + NO_DAEMON + NO_ROUTE
    assert told(CONSEQUENCES)[1] == CONSEQUENCES
    assert told(CLOSED, CONSEQUENCES)[1] == b""
    assert told(CONSEQUENCES, KILLED)[1] == b""
    assert told(REFUSED, CONSEQUENCES, SILENT)[1] == REFUSED


@pytest.mark.parametrize("said", [NO_SLOTS, INVALID, INVALID + NO_SLOTS, framed("PRTE is new and strange"), REFUSED])
def test_messages_that_are_not_understood_come_out(said):
    story = Story({"h1", "h2"})
    out = story.hear(said)
    assert out + story.rest() == said
    assert len(said) - len(out) <= len(DASHES)
    assert told(*bytewise(said))[1] == said


def test_banners_among_messages_and_ranks_are_told_apart():
    said = INVALID + b"fake orted\n" + NONZERO + b"rank 1: bye\n" + STATUS_3 + INVALID
    for chunks in ([said], bytewise(said)):
        story, out = told(*chunks)
        assert story.rank == 2
        assert out == INVALID + b"fake orted\n" + b"rank 1: bye\n" + INVALID


@pytest.mark.parametrize("rulers", [1, 2, 3])
def test_lines_of_dashes_of_ranks_do_not_hide_a_banner(rulers):
    said = b"loss\n".join([DASHES] * rulers)
    story, out = told(said + NONZERO + STATUS_3)
    assert (story.rank, story.how) == (2, "ended with status 3")
    assert out == said


@pytest.mark.parametrize(
    "said",
    [b"epoch 1:  10%|#  \r", b"[=====>   ] ", b"- item", b"Waiting ", b"C", b"\x1b[2K", b"Connecting\r", b"Time 3"],
)
def test_a_line_that_is_not_whole_comes_out_at_once(said):
    for before in (b"", DASHES):
        story = Story({"h1", "h2"})
        out = story.hear(before) + story.hear(said)
        if said == b"C":  # it could become ssh's Connection to
            out += story.hear(b"lass\r")
            assert out == before + said + b"lass\r"
        else:
            assert out == before + said


def test_a_long_message_that_never_ends_comes_out():
    said = DASHES + b"mpirun is\n" + b"talkative\n" * 60
    story = Story({"h1", "h2"})
    assert said.startswith(out := story.hear(said))
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
    said = b"".join(pieces)
    story = Story({"h1", "h2"})
    out = b""
    for heard in (chunks := chunked(data, said)):
        out += story.hear(heard)
        assert said.startswith(out)
    assert out + story.rest() == said
    assert (story.rank, story.lost) == (None, None)
    assert b"".join(chunks) == said


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
    story, out = told(*chunked(data, first + NONZERO + second + cause + third))
    assert out == first + second + third
    assert (story.rank is None) == ((story.lost or story.gone) is not None)


@pytest.fixture
def slots():
    return place(hosts(h1=2, h2=1), {"h1": machine(), "h2": machine()}, np=3, gpus="auto", binding="numa")


@pytest.fixture(autouse=True)
def hosts_answer(monkeypatch):
    monkeypatch.setattr(run, "silent_host", lambda _: None)


def story_of(said):
    return told(said)[0]


def folder_with(folder, report=None, **errors):
    """A run folder, and the report that names it."""
    (folder / "ranks").mkdir()
    for name, words in errors.items():
        (folder / "ranks" / f"{name.replace('_', '-')}.err").write_bytes(words)
    path = folder / "report.json"
    path.write_text(json.dumps({"run_folder": str(folder)} if report is None else report))
    return path


def test_a_status_is_explained_by_rank_and_host(slots):
    nowhere = Path("/nonexistent/report.json")
    assert explain(3, story_of(STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"
    assert explain(137, story_of(KILLED), slots, read_report(nowhere)) == "rank 2 on h2 died of signal 9 (Killed)"
    assert explain(1, Story({"h1", "h2"}), slots, read_report(nowhere)) == "the launcher ended with status 1"
    strange = STATUS_3.replace(b"],2]", b"],7]")
    assert explain(3, story_of(strange), slots, read_report(nowhere)) == "the launcher ended with status 3"


def test_a_lost_host_is_named_with_its_ranks(slots, monkeypatch):
    nowhere = Path("/nonexistent/report.json")
    assert explain(205, story_of(CLOSED), slots, read_report(nowhere)) == "host h2 no longer answers; it had rank 2"
    lost = CLOSED.replace(b"h2", b"h1")
    assert explain(205, story_of(lost), slots, read_report(nowhere)) == "host h1 no longer answers; it had ranks 0, 1"
    monkeypatch.setattr(run, "silent_host", lambda _: "h2")
    assert explain(205, Story({"h1", "h2"}), slots, read_report(nowhere)) == "host h2 no longer answers; it had rank 2"
    assert explain(3, story_of(STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"


def test_a_host_that_ssh_calls_by_another_name_is_found(slots, monkeypatch, tmp_path):
    nowhere = Path("/nonexistent/report.json")
    alias = CLOSED.replace(b"h2", b"203.0.113.5")
    assert explain(205, story_of(alias), slots, read_report(nowhere)) == "the launcher ended with status 205"
    assert explain(3, story_of(alias + STATUS_3), slots, read_report(nowhere)) == "rank 2 on h2 ended with status 3"
    report = folder_with(tmp_path, rank_0=b"ValueError: its own ssh ended")
    assert explain(1, story_of(alias), slots, read_report(report)).startswith(
        "rank 0 on h1 ended the run with status 1; its last"
    )
    monkeypatch.setattr(run, "silent_host", lambda _: "h2")
    assert explain(205, story_of(alias), slots, read_report(nowhere)) == "host h2 no longer answers; it had rank 2"


def test_the_last_words_of_the_first_failing_rank_are_shown(slots, tmp_path):
    report = folder_with(
        tmp_path,
        rank_0=b"Traceback\nhorovod.common.exceptions.HorovodInternalError: shut down\n",
        rank_1=b"".join(b"line %d\n" % i for i in range(30)) + b"ValueError: \xff broken\n\n",
        rank_2=b"",
        rank_x=b"not ours",
    )
    line, *words = explain(1, story_of(STATUS_3), slots, read_report(report)).splitlines()
    assert line == "rank 1 on h1 ended the run with status 1; its last words:"
    assert words == [
        *[f"    line {i}" for i in range(19, 30)],
        "    ValueError: \ufffd broken",
        f"    {tmp_path}/ranks/rank-1.err",
    ]


def test_its_banner_and_its_error_file_make_one_line(slots, tmp_path):
    report = folder_with(tmp_path, rank_2=b"MPI_ERR_INTERN: internal error")
    assert explain(3, story_of(STATUS_3), slots, read_report(report)).startswith(
        "rank 2 on h2 ended with status 3; its last words:\n"
    )


def test_what_the_program_has_said_is_not_said_again(slots, tmp_path):
    report = folder_with(tmp_path, report={"run_folder": "x", "said": "hvdtrain: --lr 0 is wrong"})
    assert explain(2, story_of(STATUS_3), slots, read_report(report)) is None


@pytest.mark.parametrize(
    "secondary", [b"HorovodInternalError", b"Broken pipe", b"MPI_ERR_INTERN", b"Connection reset by peer"]
)
def test_errors_about_another_ranks_end_come_second(tmp_path, secondary):
    folder_with(tmp_path, rank_0=secondary, rank_10=b"OutOfMemoryError", rank_2=b"ValueError")
    assert first_error(tmp_path / "ranks") == (2, f"    ValueError\n    {tmp_path}/ranks/rank-2.err")
    (tmp_path / "ranks" / "rank-2.err").unlink()
    assert first_error(tmp_path / "ranks")[0] == 10
    (tmp_path / "ranks" / "rank-10.err").unlink()
    assert first_error(tmp_path / "ranks")[0] == 0
    (tmp_path / "ranks" / "rank-0.err").unlink()
    assert first_error(tmp_path / "ranks") == (None, None)
    assert first_error(tmp_path / "missing") == (None, None)


@pytest.mark.parametrize("text", [b"", b"{", b"5", b"[1, 2]", b"null", b"\xff\xfe", b'"said"'])
def test_a_report_that_is_none_says_nothing(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text)
    assert read_report(path) == {}
    assert read_report(tmp_path) == {}
    assert read_report(tmp_path / "missing") == {}


def test_what_a_ranks_own_ssh_says_is_the_ranks_and_no_lost_host():
    story = Story({"h1", "h2"})
    said = b"Connection to data.example closed by remote host.\n"
    assert story.hear(said) + story.rest() == said
    assert (story.lost, story.gone) == (None, None)
