"""NCCL logs as NCCL_DEBUG=INFO writes them, one text for each rank, made from the formats in its sources.

No run has written them: there was no GPU. The lines that nccl_log reads stand between others
that it must pass over.
"""


def rank_log(rank, ranks, rings, ways, *, version="2.21.5+cuda12.4", channels=None, warn=None):
    """One rank's file: `rings` by channel, `ways` from this rank as {to: via}, to another host with [send]."""
    process = f"node:{4000 + rank}:{4100 + rank} [{rank}]"
    at = f"{process} NCCL INFO"
    comm = f"ncclCommInitRank comm 0x55d0 rank {rank} nranks {ranks} cudaDev 0 nvmlDev {rank} busId {rank}b000"
    lines = [
        f"{at} Bootstrap : Using eth0:10.0.0.{rank}<0>",
        f"NCCL version {version}",
        f"{at} NET/Plugin: No plugin found (libnccl-net.so)",
        f"{at} {comm} commId 0xfeed - Init START",
        f"{at} Setting affinity for GPU {rank} to ffff",
    ]
    for channel, ring in enumerate(rings):
        place = ring.index(rank)
        if rank == 0:
            lines.append(f"{at} Channel {channel:02d}/{len(rings):02d} :" + "".join(f" {one:3d}" for one in ring))
        lines.append(f"{at} Ring {channel:02d} : {ring[place - 1]} -> {rank} -> {ring[(place + 1) % ranks]}")
    lines.append(f"{at} Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1")
    lines += [f"{at} Channel 00/0 : {rank}[{rank}] -> {to}[{to}] {via}" for to, via in ways.items()]
    lines.append(f"{at} Connected all rings")
    if channels is not None:
        p2p = f"{channels} p2p channels, 2 p2p channels per peer"
        lines.append(f"{at} {channels} coll channels, {channels} collnet channels, 0 nvls channels, {p2p}")
    if warn is not None:
        lines.append(f"\n[2026-01-02 03:04:05] {process} transport/net_ib.cc:93 (ncclIbTest) NCCL WARN {warn}")
    lines.append(f"{at} {comm} commId 0xfeed - Init COMPLETE")
    return "\n".join(lines) + "\n"


def over_shared_memory(texts):
    """Return the logs of ranks that use it instead of P2P; the channel of such a line has no second number."""
    old, new = ("P2P/CUMEM/read", "Channel 00/0 : "), ("SHM/direct/direct", "Channel 00 : ")
    return {rank: text.replace(old[0], new[0]).replace(old[1], new[1]) for rank, text in texts.items()}


P2P = "via P2P/CUMEM/read"
BOTH = [[0, 1, 2, 3], [0, 3, 2, 1]]
NVLINK = {r: rank_log(r, 4, BOTH, {(r + 1) % 4: P2P, (r - 1) % 4: P2P}, channels=2) for r in range(4)}
NEXT = ("via P2P/IPC", "[send] via NET/IB/0/GDRDMA", "via P2P/IPC", "[send] via NET/IB/1/GDRDMA/Shared")
INFINIBAND = {r: rank_log(r, 4, [[0, 1, 2, 3]], {(r + 1) % 4: NEXT[r]}, channels=2) for r in range(4)}
SOCKETS = {
    rank: text.replace("NET/IB/0/GDRDMA", "NET/Socket/0").replace("NET/IB/1/GDRDMA/Shared", "NET/Socket/0")
    for rank, text in INFINIBAND.items()
}
