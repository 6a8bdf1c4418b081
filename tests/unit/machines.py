"""Machines for the tests of placing and starting, as records and as the texts that describe them."""

from dataclasses import replace

import pytest

from launch.hosts.host import Host
from launch.machine.condition import Condition, Folder
from launch.machine.software import Software
from launch.machine.topology import Gpu, Interface, Link, Nic, NumaNode, Port, Topology
from launch.run.start.request import RunRequest

# The ring that avoids SYS goes 0-2-1-3. GPU 0 and 1 are at node 0, GPU 2 and 3 at node 1.
PIX4 = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tSYS\tPIX\tPIX\t0-7\t0
GPU1\tSYS\t X \tPIX\tPIX\t0-7\t0
GPU2\tPIX\tPIX\t X \tSYS\t8-15\t1
GPU3\tPIX\tPIX\tSYS\t X \t8-15\t1
"""
RING = (0, 2, 1, 3)
NO_GPU = '{"source": "none", "gpus": [], "links": [], "nics": [], "numa_nodes": [], "interfaces": []}'


def names(kinds):
    return tuple(Link(kind=kind) for kind in kinds.split())


def machine(gpus=4, *, nics=(), interfaces=(), unusable=None, cores=range(16)):
    """So many of four GPUs, wired as in PIX4, on two nodes of eight cores, of which a run may use `cores`."""
    rows = [names("X SYS PIX PIX"), names("SYS X PIX PIX"), names("PIX PIX X SYS"), names("PIX PIX SYS X")]
    return Topology(
        source="a machine",
        gpus=tuple(
            Gpu(
                index=i,
                cores=tuple(range(8 * (i // 2), 8 * (i // 2) + 8)),
                numa=(i // 2,),
                uuid=f"GPU-{i}{i}{i}{i}",
                unusable=(unusable or {}).get(i),
            )
            for i in range(gpus)
        ),
        links=tuple(row[:gpus] for row in rows[:gpus]),
        nics=tuple(Nic(name=name, links=names(kinds)[:gpus]) for name, kinds in nics),
        numa_nodes=tuple(
            NumaNode(id=node, cores=tuple(core for core in cores if core // 8 == node)) for node in (0, 1)
        ),
        interfaces=tuple(Interface(name=name, cidr=cidr) for name, cidr in interfaces),
    )


def linked(size, kind="SYS", *, odd=None, **link):
    """So many GPUs that are all connected alike, but for some pairs: (a, b) -> link."""
    same, itself = Link(kind=kind, **link), Link(kind="X")
    links = {(a, b): itself if a == b else same for a in range(size) for b in range(size)}
    for (a, b), other in (odd or {}).items():
        links[a, b] = links[b, a] = other
    return Topology(
        source="a test",
        gpus=tuple(Gpu(index=i, uuid=f"GPU-{i}") for i in range(size)),
        links=tuple(tuple(links[a, b] for b in range(size)) for a in range(size)),
    )


def with_ports(topology, **words):
    """The machine with InfiniBand adapters, the ports of each in words: InfiniBand, Ethernet, down or down-Ethernet."""
    near = tuple(Link(kind="SYS") for _ in topology.gpus)
    ports = {
        name: tuple(
            Port(number=number, active="down" not in word, ethernet="Ethernet" in word)
            for number, word in enumerate(own.split(), start=1)
        )
        for name, own in words.items()
    }
    return replace(topology, nics=tuple(Nic(name=name, links=near, ports=own) for name, own in ports.items()))


def hosts(**slots):
    return tuple(Host(name=name, slots=count) for name, count in slots.items())


def request(**changes):
    """A run of a command line without options."""
    plain = RunRequest(
        np=2,
        program=("prog", "--lr", "0.1"),
        hosts=None,
        topologies={},
        launcher="auto",
        gpus="all",
        binding="numa",
        apptainer=None,
        nsys=False,
        network=None,
        ranks_per_replica=None,
        exports=(),
        as_root=False,
    )
    return replace(plain, **changes)


SOFTWARE = Software(
    python="3.11.2",
    torch="2.11.0",
    torchvision="0.26.0",
    horovod="0.28.1",
    mpi4py="4.1.2",
    numpy="2.4.6",
    tokenizers="0.23.3",
    horovod_has_nccl=True,
    nccl="2.28.9",
    cuda="13.0",
    driver="570.86.15",
    project="0.1.0",
    commit="0123456789abcdef",
    code="c0de",
)


def condition(*, software=SOFTWARE, **changes):
    """A host with nothing wrong, and what is changed of it."""
    sound = Condition(
        software=software,
        locked_memory_mib=None,
        shm_free_mib=8 << 10,
        folders=tuple(
            Folder(path=path, there=True, writable=True, free_mib=100 << 10)
            for path in ("/shared/runs", "/shared/data")
        ),
        sees_token=True,
        settings=(),
    )
    return replace(sound, **changes)


def refusal_of(kind, attempt):
    """The one line of the error that this attempt ends with."""
    with pytest.raises(kind) as refused:
        attempt()
    line = str(refused.value)
    assert line.isprintable()
    return line


def facts_of(findings):
    """What each of these findings says, without the punctuation and capitals of a message."""
    return [f"{one.severity}: {', '.join(one.hosts)}: {one.problem}: {one.remedy}" for one in findings]
