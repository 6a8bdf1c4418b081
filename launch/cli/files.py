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


def can_be_read_once(file: str) -> bool:
    """Return whether this is standard input or a pipe, such as `<(command)`."""
    return file == "-" or Path(file).is_fifo()


def read(file: str, option: str = "") -> tuple[str, str]:
    """Return a file's text, and its name for messages, which begin with `option`."""
    try:
        return (text_of(sys.stdin.buffer), "standard input") if file == "-" else (read_named(Path(file)), file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{option}{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write(file: Path, text: str) -> None:
    """Write a whole file, or nothing; follow a link, and write into a pipe or a device such as /dev/stdout."""
    try:
        if file.exists() and not file.is_file():
            file.write_text(text)
        else:
            write_whole(file.resolve(), text)
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


def measured_files(options: argparse.Namespace) -> tuple[Measured, Traffic | None]:
    """Read what --measured names: measurements of hosts, and the folder or file with the traffic of a run's ranks."""
    of_hosts, of_run = list[Measured](), list[Traffic]()
    for word in options.measured:
        is_folder = Path(word).is_dir()
        text, name = read(str(Path(word) / traffic.FILE) if is_folder else word, "--measured ")
        if is_folder or traffic.is_traffic(text):
            of_run.append(traffic.read(text, name=name))
        else:
            of_hosts.append(measured.read(text, name=name))
        if len(of_hosts) > 1 or len(of_run) > 1:
            raise LaunchError(f"--measured {word}: a second one of its kind. Pass one of hosts and one of a run.")
    return of_hosts[0] if of_hosts else Measured(), of_run[0] if of_run else None
