"""Lists of hosts for the tests, and how a refusal reads."""

import re

from launch.errors import HostfileError
from launch.hosts.hostfile import read
from tests.unit.machines import refusal_of

VALID = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\Z")
NO_NAMES = ["a;rm", "-oProxyCommand=x", "$(x)", "`x`", "a|b", "../a", ".a", "a..b", "'a'", "a\\b"]
NO_NAMES += ["\u0430", "\u0661"]  # a Cyrillic letter, and a digit to str.isdigit()
NO_NAMES += ["a\u2028b", "a\x00b", "a\x1b[31mb", "a\udc80", "%h", "user@host", "fe80::1"]
NO_NAMES += ["a" * 64, ".".join(["a" * 50] * 5)]


def refusal(call, *arguments, **options):
    message = refusal_of(HostfileError, lambda: call(*arguments, **options))
    assert len(message) < 500
    return message


def refused(text, **options):
    return refusal(read, text, name="hosts", **options)
