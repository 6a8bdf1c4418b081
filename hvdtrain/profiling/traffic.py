"""Bytes that this host has sent to others, as the kernel and the InfiniBand ports count them."""

import contextlib
from pathlib import Path


def sent_bytes(root: Path = Path("/sys/class")) -> int | None:
    """Since the host started; None where it does not say.

    Of network cards: bridges and tunnels would count the same bytes again. Only where there is no card, as in a
    container, all interfaces but the loopback are.
    """
    interfaces = [one for one in root.glob("net/*") if one.name != "lo"]
    cards = [one for one in interfaces if (one / "device").exists()] or interfaces
    words = 4  # of an InfiniBand port's counter
    counters = [(one / "statistics/tx_bytes", 1) for one in cards if not one.name.startswith("ib")]
    counters += [(one, words) for one in root.glob("infiniband/*/ports/*/counters/port_xmit_data")]
    found = []
    for counter, unit in counters:
        with contextlib.suppress(OSError, ValueError):
            found.append(unit * int(counter.read_text()))
    return sum(found) if found else None
