import re
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import HostfileError
from launch.hosts import host, hostfile
from launch.hosts.host import Host
from launch.hosts.hostfile import from_option, read, to_option, write
from launch.hosts.slurm import from_slurm
from tests.unit.hosts.lists import NO_NAMES, VALID, refusal, refused
from tests.unit.machines import hosts

EXAMPLES = Path(__file__).parents[3] / "hostfiles"
WRITABLE = typing.get_args(hostfile.Writable)


AB = hosts(a=8, b=4)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.openmpi")), ids=lambda path: path.stem)
@pytest.mark.parametrize("spelling", WRITABLE)
def test_examples_are_what_the_program_writes(example, spelling):
    described = read(example.read_text(), name=str(example))
    path = example.with_suffix(f".{spelling}")
    command = f"hvdlaunch hostfile --hostfile {example} --format {spelling} -o {path}"
    assert path.read_bytes().decode() == write(described, spelling), f"to write it anew: {command}"
    assert [(host.name, host.slots) for host in read(path.read_text(), name=str(path))] == [
        (host.name, host.slots) for host in described
    ]


@pytest.mark.parametrize("word", ["slots", "cpu", "count"])
def test_open_mpi_synonyms_of_slots_and_of_max_slots(word):
    assert read(f"a {word}=8\nb {word} = 4", name="hosts") == AB
    for most in (f"max-{word}", f"max_{word}", f"{word}-max", f"{word}_max"):
        assert read(f"a slots=2 {most} = 3", name="hosts") == (Host(name="a", slots=2, max_slots=3),)


@pytest.mark.parametrize(
    "text",
    [
        "\n# comment: ünï, $(x), a;b\n  a\tslots =8#eight\n\n\t\nb slots= 4 # max_slots=2\n\n",
        " a:8 # rank 0=c slot=0\n\n#\nb:4",
        "a:7\nb\na\nb:3",
        "a slots=7\nb slots=4\na\n",
        "".join(f"rank {rank}=a slot={rank}\n" for rank in range(8))
        + "".join(f"rank {rank} = b slots = 0:{rank} # x\n" for rank in range(8, 12)),
        "".join(f"rank {rank}={'ab'[rank >= 8]} slot=0-3,8;1:*\n" for rank in reversed(range(12))),
    ],
)
def test_all_spellings_of_the_same_hosts(text):
    found = read(text, name="hosts")
    assert sorted(found, key=lambda host: host.name) == list(AB)


def test_hosts_stand_in_the_order_of_first_mention_and_of_ranks():
    assert read("b:1\na:2\nb:3\n", name="hosts") == hosts(b=4, a=2)
    assert read("rank 1=a slot=0\nrank 0=b slot=0\n", name="hosts") == hosts(b=1, a=1)


def test_a_bare_name_is_one_slot_and_a_limit_alone_is_the_number_of_slots():
    for text in ("rank\n", "rank:1\n", "rank slots=1\n"):
        assert read(text, name="hosts") == hosts(rank=1)
    assert read("a\nb max_slots=3\n", name="hosts") == (Host(name="a", slots=1), Host(name="b", slots=3, max_slots=3))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a slots=8\n\nb:4\n", 3, "'b:4' is mpich in a file that is openmpi"),
        ("a\nb\nrank 0=a slot=1\n", 1, "'a' is not a line of a rankfile"),
        ("a slots=8\nb slots=4 slots=5\n", 2, "'slots' gives slots a second time"),
        ("a\na slots=2\n", 2, "'a' has its slots further up"),
        ("a slots=3 max_slots=2\n", 1, "max_slots 2 for 3 slots"),
        ("a slots=\n", 1, "'slots' is not understood"),
        ("a slots=8 foo\n", 1, "'foo' is not understood; write host slots=8"),
        ("a slots=8 username=bob\n", 1, "'username' put it into ~/.ssh/config"),
        ("a:8 binding=user:0\n", 1, "'binding' remove it: hvdlaunch binds"),
        ("a:8 b:8\n", 1, "'b:8' is not understood after a host"),
        (":8\n", 1, "'' is not a host name"),
        ("a:8,b:4\n", 1, "'a:8,b:4' is not host:8"),
        ("a slots=8\r\nb slots=4\r\n", 1, "carriage return"),
        ("\ufeffa slots=8\n", 1, r"'\ufeffa' is not a host name"),
        ("", 1, "no host"),
        ("rank 0=a slot=0\nrank 2=a slot=1\n", 2, "'2' is a rank but 1 is missing"),
        ("rank 0=a slot=0\n\nrank 0=b slot=0\n", 3, "'0' is a rank that hosts:1 has already"),
        ("rank 0=a\n", 1, "is not a line of a rankfile; write rank 0=host slot=0-3"),
        ("rank 0=a slot=*\n", 1, "'*' are not cores that Open MPI can read"),
        (f"rank 0=a slot={'1,' * 32}1\n", 1, "are not cores that Open MPI can read"),
    ],
)
def test_refuses_with_file_and_line(text, line, words):
    message = refused(text)
    assert message.startswith(f"hosts:{line}: ")
    assert words in message


def test_long_lines_files_and_lists_are_refused(monkeypatch):
    assert refused(f"a\na #{'x' * 1022}\n").startswith("hosts:2: 'a #xxx")
    assert read(f"a #{'x' * 1021}\n", name="hosts") == hosts(a=1)
    assert refused(f"a\n{'b' * 2**20}").startswith("hosts:1: ")
    monkeypatch.setattr(host, "MAX_HOSTS", 3)
    assert refused("h0\nh1\nh2\nh3\n").startswith("hosts:4: 'h3' is one host too many")
    assert len(read("h0\nh1\nh2\n", name="hosts")) == 3


LABELS = st.text("aZ09_-", min_size=1, max_size=63)
NAMES = st.lists(LABELS, min_size=1, max_size=3).map(".".join).filter(VALID.match)
SLOTS = st.dictionaries(NAMES, st.integers(1, 64), min_size=1, max_size=8)


@settings(max_examples=40)
@given(SLOTS, st.permutations(WRITABLE))
def test_hosts_survive_any_chain_of_spellings(slots, chain):
    some = through = hosts(**slots)
    for spelling in chain:
        through = read(write(through, spelling), name="hosts")
    assert through == some
    assert from_option(to_option(through)) == some


def test_limits_survive_open_mpi():
    limited = (Host(name="a", slots=2, max_slots=2), Host(name="b", slots=1, max_slots=4096), Host(name="c", slots=3))
    assert read(write(limited, "openmpi"), name="hosts") == limited
    assert "=2\nb" in write(limited, "horovod")  # whose own reader takes what stands between the first two "="


LINES = ["a slots=8", "b slots=4 max_slots=6", "# comment", "", "c", "gpu-1.lab:8", "10.0.0.3"]
LINES += [f"rank {rank}=h{rank // 2} slot={rank % 2}:0-3" for rank in range(3)]
SPICE = st.sampled_from([*NO_NAMES, *"\n\r\t =:#0-,\0", "\r\n", "slots", "9" * 12]) | st.text(max_size=3)
SPICED = st.tuples(st.sampled_from(LINES), SPICE, st.integers(0, 12)).map(
    lambda of: of[0][: of[2]] + of[1] + of[0][of[2] :]
)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(LINES) | SPICED, max_size=5).map("\n".join) | st.text())
def test_random_files_are_read_or_refused(text):
    try:
        found = read(text, name="hosts")
    except HostfileError as error:
        assert re.match(r"hosts:[0-9]+: .", str(error)), str(error)  # noqa: PT017
        assert str(error).isprintable(), str(error)  # noqa: PT017
    else:
        assert found
        assert all(VALID.match(host.name) and 1 <= host.slots <= 4096 for host in found)
        assert read(write(found, "openmpi"), name="hosts") == found


@pytest.mark.parametrize("name", NO_NAMES)
def test_refuses_a_name_in_every_spelling(name):
    for call, where in [
        (lambda: read(f"ok slots=1\n{name} slots=2\n", name="hosts"), "hosts:2: "),
        (lambda: read(f"ok:1\n{name}:2\n", name="hosts"), "hosts:2: "),
        (lambda: read(f"rank 0=ok slot=0\nrank 1={name} slot=1\n", name="hosts"), "hosts:2: "),
        (lambda: from_option(f"ok:1,{name}:2"), "-H: "),
        (lambda: from_option(name), "-H: "),
        (lambda: from_slurm(f"ok,{name}[1-2]"), "Slurm's node list: "),
    ]:
        message = refusal(call)
        assert message.startswith(where)
        assert ";" in message, "a remedy"


@pytest.mark.parametrize("name", ["7", "A-b_c.d-e.f", "10.0.0.1", "a" * 63, ".".join(["a" * 62] * 4)])
def test_accepts_names_and_addresses(name):
    assert VALID.match(name)
    assert read(f"{name} slots=2\n", name="hosts") == from_option(f"{name}:2") == hosts(**{name: 2})
    assert from_slurm(f"{name}:2") == hosts(**{name: 2})


@pytest.mark.parametrize("slots", ["0", "-1", "1.5", "4097", "9" * 900, "\u0663", "1_0"])
def test_refuses_slots(slots):
    lines = [refused(text) for text in (f"a slots={slots}", f"a max_slots={slots}", f"a:{slots}")]
    for message in (*lines, refusal(from_option, f"a:{slots}"), refusal(from_slurm, f"a[1-2]:{slots}")):
        assert ascii(slots)[1:50] in message


def test_slots_of_a_host_add_up_but_not_to_too_many():
    assert from_option("a:2,b,a:3,b") == hosts(a=5, b=2)
    assert from_option("a:4095,a") == hosts(a=4096)
    assert "4097 slots in all" in refusal(from_option, "a:4096,a")


@pytest.mark.parametrize(
    ("found", "counted", "for_ranks"),
    [
        (from_option("a,b:64,c,c"), "bc", ""),
        (read("a\nb slots=64\nc max_slots=2\nd\nd\n", name="hosts"), "bcd", "c"),
        (read("a slots=8 max_slots=8\n", name="hosts"), "a", "a"),
        (read("rank 0=a slot=0\n", name="hosts"), "a", "a"),
        (from_slurm("a,b:2"), "b", ""),
    ],
)
def test_a_number_counts_and_is_for_ranks_if_it_cannot_be_that_of_cores(found, counted, for_ranks):
    assert "".join(host.name for host in found if host.counted) == counted
    assert "".join(host.name for host in found if host.unit == "rank") == for_ranks
    assert all(host.slots == 1 for host in found if not host.counted)
