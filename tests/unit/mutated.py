"""JSON documents with one wrong part each, as a broken, older or hostile sender makes them."""

import copy

WRONG = (None, True, -1, 10**30, 0.5, "", "\x1b[31mred\nline", "\ud800", "x" * 5000, [], [None], {}, {"a": 1})


def mutated(document):
    """(where, the document) with each of its parts replaced by each wrong value, or left out."""
    for path in list(_paths(document)):
        where = ".".join(map(str, path))
        for wrong in WRONG:
            changed = copy.deepcopy(document)
            _at(changed, path[:-1])[path[-1]] = wrong
            yield f"{where}={ascii(wrong)[:20]}", changed
        changed = copy.deepcopy(document)
        del _at(changed, path[:-1])[path[-1]]
        yield f"{where} left out", changed
        changed = copy.deepcopy(document)
        if isinstance(inner := _at(changed, path), dict):
            inner["new"] = 1
            yield f"{where} with more", changed


def _at(document, path):
    for step in path:
        document = document[step]
    return document


def _paths(value, path=()):
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in parts:
        yield (*path, step)
        yield from _paths(part, (*path, step))
