"""Reads and writes files named by options; - is standard input."""

import argparse
import sys
from pathlib import Path

from launch.errors import LaunchError
from launch.files import read_named, text_of, write_whole
from launch.hosts import hostfile
from launch.hosts.host import Host
from launch.placement import measured, traffic
from launch.placement.measured import Measured
from launch.placement.traffic import Traffic


def read(file: str) -> tuple[str, str]:
    """Return a file's text, and its name for messages."""
    try:
        return (text_of(sys.stdin.buffer), "standard input") if file == "-" else (read_named(Path(file)), file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write(file: Path, text: str) -> None:
    """Write a whole file, or nothing."""
    try:
        write_whole(file, text)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error


def listed_hosts(options: argparse.Namespace) -> tuple[Host, ...] | None:
    """Return the hosts of -H or --hostfile; None without either."""
    if options.hosts is not None:
        return hostfile.from_option(options.hosts)
    if options.hostfile is None:
        return None
    return hosts_in(options.hostfile)


def hosts_in(file: str) -> tuple[Host, ...]:
    """Return the hosts of a file in any notation."""
    text, name = read(file)
    return hostfile.read(text, name=name)


def measured_file(options: argparse.Namespace, *, needs_links: bool = False) -> Measured:
    """Read the measurements in the file of --measured; empty without the option."""
    if options.measured is None:
        return Measured()
    text, name = read(options.measured)
    return measured.read(text, name=name, needs_links=needs_links)


def recorded_traffic(options: argparse.Namespace) -> Traffic | None:
    """Read the traffic of an earlier run's ranks from the folder or file of --traffic; None without the option."""
    if options.traffic is None:
        return None
    file = Path(options.traffic)
    text, name = read(str(file / traffic.FILE if file.is_dir() else file))
    return traffic.read(text, name=name)
