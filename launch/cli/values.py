"""Pure: converts an option's text to its value; ArgumentTypeError, which argparse prints in one line, if invalid."""

import argparse
import re

from launch.cores import parse_numbers

MOST_SECONDS = 86_400


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not re.fullmatch("0*[1-9][0-9]{0,30}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def indices(text: str) -> tuple[int, ...]:
    """Parse GPU indices such as 0,3 or 0-3, without duplicates."""
    numbers = parse_numbers(text)
    if numbers is None or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU indices, each once, as in 0,3 or 0-3")
    return tuple(numbers)


def some_gpus(text: str) -> str | tuple[int, ...]:
    """Parse the GPUs to choose from: 'all', or their indices."""
    return text if text == "all" else indices(text)


def gpus_or_none(text: str) -> str | tuple[int, ...]:
    """Parse GPUs like `some_gpus`, or 'none' for CPUs."""
    return text if text == "none" else some_gpus(text)


def sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of ranks, in increasing order."""
    numbers = parse_numbers(text)
    if numbers is None or len({*numbers, 0}) <= len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks, each once, as in 1,2,4")
    return tuple(sorted(numbers))


def seconds(text: str) -> float:
    """Parse seconds, from 1 to MOST_SECONDS."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {MOST_SECONDS}")
    return number


def ssh_option(text: str) -> str:
    """Parse KEY=VALUE; Open MPI splits such options at blanks, and a shell of the host interprets them."""
    if not re.fullmatch(r"[A-Za-z]+=[\w@%+:,./~-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE without blanks or quotes; put other options into ~/.ssh/config"
        )
    return text


def image(text: str) -> str:
    """Parse the path of an image."""
    if text.startswith("-"):  # apptainer would treat it as an option
        raise argparse.ArgumentTypeError(f"{text!r} is not an image: pass its path, such as ./image.sif")
    return text
