"""Measure all-reduces of 1 KB to 256 MB between the ranks, on the path that gradients take.

    mpirun -np 2 python -m hvdtrain.bandwidth                                on GPUs if each rank has one
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.bandwidth      two hosts
    mpirun -np 2 python -m hvdtrain.bandwidth --over ours,mpi4py,gloo        compared with others, in turn
    hvdlaunch run -H one:8,two:8 -- python -m hvdtrain.bandwidth --over two-level      the sum of --sync two-level
    horovodrun --gloo -np 2 python -m hvdtrain.bandwidth                     Horovod's Gloo instead of MPI
    hvdlaunch run -np 8 -- python -m hvdtrain.bandwidth --pairs              also between every two ranks of a host

Bandwidths are defined as in NVIDIA's nccl-tests: the algorithm's is bytes / time, the bus's is that times 2(p-1)/p for
p ranks. A ring sends this amount over each link, so it can be compared between numbers of ranks. A pair's bandwidth is
bytes / time of its fastest exchange, in which both send the same number of bytes. 1 KB is 1,024 bytes.
`--json FILE` writes the results for other programs: rank 0 writes the fields of SumTiming and ExchangeTiming.

2 ranks on 2 cores of an AMD EPYC, Open MPI 4.1.8: see "How fast is an all-reduce?" in docs/explanation/benchmarks.md.
"""

import argparse
import itertools
import math
import re
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch import Tensor

from hvdtrain.insight.tracking.files import write_json
from hvdtrain.parallel.sync.comm import group_ranks
from hvdtrain.parallel.sync.groups import Groups
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import choose_device, require_own_device, share_cores
from hvdtrain.ranks.links import SUMS as FLAT_SUMS
from hvdtrain.ranks.links import Exchange, InPlaceSum, make_exchange, pair_rounds, time_exchanges
from hvdtrain.settings.safety import exits, output
from hvdtrain.settings.safety.exits import BadInput, EndOfRun
from hvdtrain.settings.safety.torch_version import require_tested

SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,256MB"
TWO_LEVEL = "two-level"
_UNITS = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
MOST_BYTES = 4 * 2**30  # MPI counts elements to 2^31
WARMUPS = 2  # the first sum of a name is negotiated
# Memory per byte of the largest sum: the values, their expected sum, and the buffers of the sum.
COPIES = 4
LATENCY_BYTES, BANDWIDTH_BYTES = 2**10, 64 * 2**20  # sizes for the last line
_PERIOD = 251  # of the values, a prime: no two chunks of a sum can be confused


@dataclass(frozen=True, kw_only=True)
class SumTiming:
    """The sums of one size by one of SUMS."""

    over: str
    bytes: int
    times_s: tuple[float, ...]  # each of the slowest rank; the kinds in `over` took turns
    median_s: float
    algorithm_gb_per_s: float  # 1e9 bytes, by the median
    bus_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class ExchangeTiming:
    """The exchanges of one size between two ranks, in both directions at once."""

    ranks: tuple[int, int]
    bytes: int  # one way
    times_s: tuple[float, ...]  # each of the slower rank
    median_s: float
    gb_per_s: float  # one way, 1e9 bytes, by the fastest: Open MPI over TCP sometimes alternates the directions


def main() -> None:
    """Run one rank, from its command line to the last line of the table."""
    comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
    share_cores(comm)
    untested = agree(comm, require_tested)
    arguments = agree(comm, lambda: parse(sys.argv[1:]))
    device = agree(comm, lambda: usable_device(comm, arguments))
    require_own_device(comm, device)
    pairs: list[ExchangeTiming] = []
    if arguments.pairs:  # first: Horovod's thread would compete with them
        exchange = agree(comm, lambda: make_exchange(comm, device))
        pairs = measure_pairs(comm, exchange, arguments, device)
    sums = {name: agree(comm, partial(SUMS[name], comm)) for name in arguments.over}
    is_printing = comm.rank == 0 and not arguments.quiet
    if is_printing and untested:
        exits.print_message("note", untested)
    if is_printing and pairs:
        output.print_line("\n".join(map(format_pair, pairs)))
    measured: list[SumTiming] = []
    for size in arguments.sizes:
        if is_within(arguments, measured, size):
            measured += measure(comm, sums, size, arguments.repeats, device)
            if is_printing:
                output.print_line("\n".join(map(format_sum, measured[-len(sums) :])))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if is_printing:
        output.print_line(f"{comm.size} ranks, {name}: {summary(measured)}")
    if comm.rank == 0 and arguments.json is not None:
        lines = {"measured": list(map(asdict, measured)), "pairs": list(map(asdict, pairs))}
        write_json(arguments.json, {"ranks": comm.size, "ranks_per_host": comm.local_size, "device": name, **lines})


def two_level_sum(comm: Comm) -> InPlaceSum:
    """Return the sum of --sync two-level: Horovod sums in each host, then MPI between hosts."""
    groups = group_ranks(comm, None).data
    assert isinstance(groups, Groups)
    groups.start()

    def add(values: Tensor) -> None:
        groups.sum_by_levels(values, f"bandwidth.{values.numel()}")
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return add


SUMS = {**FLAT_SUMS, TWO_LEVEL: two_level_sum}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message.removeprefix('argument ')}. See --help.")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; BadInput if the arguments cannot work."""
    parser = _Parser(
        prog="python -m hvdtrain.bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--sizes", type=parse_sizes, default=SIZES, help=f"bytes, or with KB, MB or GB; default: {SIZES}")
    add("--over", type=parse_over, default="ours", help=f"one or more of {','.join(SUMS)}; default: ours")
    add("--repeats", type=int, default=20, help="sums of each size that are timed; default: 20")
    add("--limit-s", type=float, default=math.inf, metavar="S", help="leave out sizes once the others took so long")
    add("--pairs", action="store_true", help="also between every two ranks of a host, or every two hosts")
    add("--quiet", action="store_true", help="print nothing")
    add("--json", type=Path, metavar="FILE", help="where rank 0 writes the measurements")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        raise BadInput(f"--repeats {options.repeats}: too few for a spread. Pass at least 2.")
    if not options.limit_s > 0:
        raise BadInput(f"--limit-s {options.limit_s:g}: must be more than 0. Pass a number of seconds.")
    if options.json is not None and not options.json.parent.is_dir():
        raise BadInput(f"--json {options.json}: folder {options.json.parent} does not exist. Create it first.")
    if options.json is not None and options.json.is_dir():
        raise BadInput(f"--json {options.json}: a folder. Pass a file in it.")
    return options


def parse_over(words: str) -> tuple[str, ...]:
    """Return the names of sums; BadInput if they are not of SUMS, or cannot be measured together."""
    over = tuple(words.split(","))
    if unknown := [name for name in over if name not in SUMS]:
        raise BadInput(f"--over {unknown[0]!r}: unknown. Choose from {', '.join(SUMS)}.")
    if len(set(over)) < len(over):
        raise BadInput(f"--over {words}: a name is repeated. Name each once.")
    if TWO_LEVEL in over and len(over) > 1:
        raise BadInput(f"--over {words}: Horovod joins the ranks of one host for {TWO_LEVEL}. Measure it alone.")
    return over


def parse_sizes(words: str) -> tuple[int, ...]:
    """Return the bytes of sizes such as 64KB,64MB; BadInput if one is not a valid number of float32 values."""
    sizes = []
    for word in words.split(","):
        match = re.fullmatch(r"(\d{1,10})(KB|MB|GB|)", word.strip().upper(), re.ASCII)
        size = int(match[1]) * _UNITS[match[2]] if match else 0
        if size < 4 or size % 4 or size > MOST_BYTES:
            raise BadInput(
                f"--sizes {word!r}: must be a multiple of 4 bytes up to 4GB. Pass sizes such as 1024, 64KB or 16MB."
            )
        sizes.append(size)
    return tuple(sizes)


def usable_device(comm: Comm, arguments: argparse.Namespace) -> torch.device:
    """Return this rank's device; BadInput if there is nothing to sum, or not enough memory."""
    if comm.size == 1:
        raise BadInput("one process: nothing to all-reduce with. Run mpirun -np 2 python -m hvdtrain.bandwidth.")
    device = choose_device(comm)
    if device.type == "cuda" and arguments.over not in (("ours",), (TWO_LEVEL,)):
        raise BadInput(
            f"--over {','.join(arguments.over)}: only ours or {TWO_LEVEL} is measured on GPUs. Pass --over ours, or "
            "set CUDA_VISIBLE_DEVICES= for CPUs."
        )
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    ranks_on_device = 1 if device.type == "cuda" else comm.local_size
    if COPIES * max(arguments.sizes) * ranks_on_device > free:
        largest_mb = free // (COPIES * ranks_on_device * 2**20)
        raise BadInput(
            f"--sizes {format_size(max(arguments.sizes))}: does not fit into the free memory. Pass at most "
            f"{largest_mb}MB."
        )
    return device


def measure(
    comm: Comm, sums: Mapping[str, InPlaceSum], size: int, repeats: int, device: torch.device
) -> list[SumTiming]:
    """Time sums of `size` bytes, in turn; EndOfRun with status 1 if a result is wrong."""
    pattern = make_pattern(size, device)
    values, token = torch.empty_like(pattern), torch.zeros(1, device=device)
    times_s: dict[str, list[float]] = {name: [] for name in sums}
    wrong_names = []
    for number in range(-WARMUPS, repeats):
        for name in list(sums) if number % 2 == 0 else reversed(list(sums)):
            torch.add(pattern, comm.rank, out=values)
            sums[name](token)  # all ranks leave it together
            start = time.perf_counter()
            sums[name](values)
            times_s[name].append(time.perf_counter() - start)
            if not is_sum(values, pattern, comm.size):
                wrong_names.append(name)
    by_rank = comm.allgather([times_s, wrong_names])
    for rank, (_, names) in enumerate(by_rank):
        if names:
            raise EndOfRun(
                f"all-reduce of {format_size(size)} over {names[0]}: wrong result on rank {rank}. Check memory and "
                "network of its host.",
                status=exits.FAILED,
                reason="wrong sum",
            )
    slowest_s = {name: [max(times) for times in zip(*(own[name] for own, _ in by_rank), strict=True)] for name in sums}
    return [summarize_times(name, size, comm.size, slowest_s[name][WARMUPS:]) for name in sums]


def measure_pairs(
    comm: Comm, exchange: Exchange, arguments: argparse.Namespace, device: torch.device
) -> list[ExchangeTiming]:
    """Time the pairs of `pair_rounds`, concurrently within a round; EndOfRun with status 1 if a value is wrong."""
    timings: list[ExchangeTiming] = []
    for pairs in pair_rounds(comm.allgather(socket.gethostname())):
        lines: dict[tuple[int, int], list[ExchangeTiming]] = {pair: [] for pair in pairs}
        for size in arguments.sizes:
            active = [pair for pair in pairs if is_within(arguments, lines[pair], size)]
            outcome: tuple[list[float], bool] = [], True
            for pair in active:
                if comm.rank in pair:  # in one at most
                    ranks = comm.rank, sum(pair) - comm.rank
                    pattern = make_pattern(size, device)
                    outcome = time_exchanges(exchange, pattern, ranks, repeats=WARMUPS + arguments.repeats)
            by_rank = comm.allgather(outcome)
            for pair in active:
                if not all(by_rank[rank][1] for rank in pair):
                    raise EndOfRun(
                        f"ranks {pair[0]} and {pair[1]}: the {format_size(size)} they exchanged arrived changed. "
                        "Check memory and network of their hosts.",
                        status=exits.FAILED,
                        reason="wrong values",
                    )
                slower_s = tuple(map(max, *(by_rank[rank][0] for rank in pair)))[WARMUPS:]
                lines[pair].append(
                    ExchangeTiming(
                        ranks=pair,
                        bytes=size,
                        times_s=slower_s,
                        median_s=statistics.median(slower_s),
                        gb_per_s=size / min(slower_s) / 1e9,
                    )
                )
        timings += itertools.chain.from_iterable(lines.values())
    return timings


def make_pattern(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of float32 values in which no two chunks can be confused."""
    count = size // 4
    return torch.arange(_PERIOD, dtype=torch.float32, device=device).repeat(-(-count // _PERIOD))[:count]


def is_within(arguments: argparse.Namespace, lines: Sequence[SumTiming] | Sequence[ExchangeTiming], size: int) -> bool:
    """Return whether this size ends within --limit-s, if each byte takes as long as at the last one; on all ranks."""
    if not lines:
        return True
    expected_s = lines[-1].median_s * max(1.0, size / lines[-1].bytes)
    spent_s = sum(sum(line.times_s) for line in lines)
    return bool(spent_s + expected_s * (WARMUPS + arguments.repeats) <= arguments.limit_s)


def is_sum(values: Tensor, pattern: Tensor, ranks: int) -> bool:
    """Return whether these are exactly the sums of pattern + rank over all ranks; `values` is overwritten."""
    return torch.equal(values.sub_(ranks * (ranks - 1) / 2).div_(ranks), pattern)


def summarize_times(over: str, size: int, ranks: int, times_s: Sequence[float]) -> SumTiming:
    """Return the statistics of one size."""
    median_s = statistics.median(times_s)
    algorithm = size / median_s / 1e9
    return SumTiming(
        over=over,
        bytes=size,
        times_s=tuple(times_s),
        median_s=median_s,
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=algorithm * 2 * (ranks - 1) / ranks,
    )


def format_sum(line: SumTiming) -> str:
    """Format a line of the table."""
    spread = f"{min(line.times_s) * 1e3:.3f} to {max(line.times_s) * 1e3:.3f}, n = {len(line.times_s)}"
    return (
        f"{format_size(line.bytes):>6} {line.over:<7} {line.median_s * 1e3:9.3f} ms ({spread})  "
        f"algorithm {line.algorithm_gb_per_s:.3f} GB/s, bus {line.bus_gb_per_s:.3f} GB/s"
    )


def format_pair(line: ExchangeTiming) -> str:
    """Format a line of the table."""
    first, second = line.ranks
    return (
        f"{format_size(line.bytes):>6} ranks {first} and {second} {line.median_s * 1e3:9.3f} ms "
        f"(n = {len(line.times_s)})  {line.gb_per_s:.3f} GB/s"
    )


def summary(measured: Sequence[SumTiming]) -> str:
    """Return the latency at 1KB and the bus bandwidth at 64MB of each kind, if measured."""
    parts = []
    for line in measured:
        if line.bytes == LATENCY_BYTES:
            parts.append(f"{line.over} latency {line.median_s * 1e3:.3f} ms at {format_size(line.bytes)}")
        if line.bytes == BANDWIDTH_BYTES:
            parts.append(f"{line.over} bus bandwidth {line.bus_gb_per_s:.3f} GB/s at {format_size(line.bytes)}")
    return ", ".join(parts) or "no summary: pass --sizes with 1KB or 64MB"


def format_size(size: int) -> str:
    """Format bytes with the largest unit that fits, for example 64MB."""
    unit = max((unit for unit, count in _UNITS.items() if size % count == 0), key=_UNITS.__getitem__)
    return f"{size // _UNITS[unit]}{unit or 'B'}"


if __name__ == "__main__":
    exits.run(main)
