"""Bytes that this host has sent to others, from the counters of the kernel and the InfiniBand ports."""

import contextlib
from pathlib import Path


def sent_bytes(root: Path = Path("/sys/class")) -> int | None:
    """Return the bytes sent since the host started; None if the host has no such counters.

    Only network cards count: bridges and tunnels would count the same bytes again. Without a card, for example in a
    container, all interfaces except the loopback count.
    """
    interfaces = [path for path in root.glob("net/*") if path.name != "lo"]
    cards = [path for path in interfaces if (path / "device").exists()] or interfaces
    word_bytes = 4  # unit of an InfiniBand port's counter
    counters = [(path / "statistics/tx_bytes", 1) for path in cards if not path.name.startswith("ib")]
    counters += [(path, word_bytes) for path in root.glob("infiniband/*/ports/*/counters/port_xmit_data")]
    counts = []
    for counter, unit in counters:
        with contextlib.suppress(OSError, ValueError):
            counts.append(unit * int(counter.read_text()))
    return sum(counts) if counts else None
