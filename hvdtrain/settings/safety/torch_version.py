"""The torch that is installed: those on which the tests ran, and what a program prints about others."""

from importlib.metadata import version

from hvdtrain.settings.safety.exits import BadInput

TESTED = ((2, 7), (2, 11), (2, 14))  # those of requirements/*.in


def require_tested() -> str | None:
    """Return a note if this torch was not tested; raise BadInput if it is older than all that were."""
    installed, tested = version("torch"), [".".join(map(str, release)) for release in TESTED]
    release = tuple(map(int, installed.split(".")[:2]))
    if release < TESTED[0]:
        raise BadInput(
            f"torch {installed}: older than all that were tested ({', '.join(tested)}). Install torch {tested[-1]}, or "
            "run `make setup` in a clone of hvdtrain."
        )
    return None if release in TESTED else f"torch {installed} was not tested. Tested: {', '.join(tested)}."
