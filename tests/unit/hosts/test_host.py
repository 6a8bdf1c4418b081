import pytest

from launch.hosts.hostfile import from_option, read
from launch.hosts.slurm import from_slurm
from tests.unit.hosts.lists import NO_NAMES, VALID, hosts, refusal, refused


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


@pytest.mark.parametrize("name", ["a\nb", "a b", ""])
def test_refuses_blanks_and_line_ends_in_names(name):
    refusal(from_option, f"ok:1,{name}:2")
    refusal(from_option, f"ok,{name}")
    refusal(from_slurm, f"ok,{name}[1-2]") if name else refusal(from_slurm, "ok,")
    if "\n" not in name and name.strip():  # in a file these stand for two lines, or for none
        refused(f"{name} slots=2\n")
        refused(f"{name}:2\n")


def test_names_the_remedy_for_users_and_ipv6():
    assert "~/.ssh/config" in refused("user@host slots=8\n")
    assert "IPv6" in refused("fe80::1 slots=8\n")
    assert "IPv6" in refusal(from_option, "fe80::1:8")


@pytest.mark.parametrize("name", ["7", "A-b_c.d-e.f", "10.0.0.1", "a" * 63, ".".join(["a" * 62] * 4)])
def test_accepts_names_and_addresses(name):
    assert VALID.match(name)
    assert read(f"{name} slots=2\n", name="hosts") == from_option(f"{name}:2") == hosts((name, 2))
    assert from_slurm(f"{name}:2") == hosts((name, 2))


@pytest.mark.parametrize("slots", ["0", "-1", "1.5", "4097", "9" * 900, "\u0663", "1_0"])
def test_refuses_slots(slots):
    lines = [refused(text) for text in (f"a slots={slots}", f"a max_slots={slots}", f"a:{slots}")]
    for message in (*lines, refusal(from_option, f"a:{slots}"), refusal(from_slurm, f"a[1-2]:{slots}")):
        assert ascii(slots)[1:50] in message


def test_slots_that_add_up_to_too_many_are_refused():
    assert from_option("a:4095,a") == hosts(("a", 4096))
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
