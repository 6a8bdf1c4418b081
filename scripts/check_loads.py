"""Refuse loaders that can run code from a file, in the cases that ruff's rules S301 and S506 do not see.

python scripts/check_loads.py hvdtrain launch scripts bench
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

NEVER = {
    "pickle.load",
    "pickle.loads",
    "dill.load",
    "dill.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "joblib.load",
    "yaml.load",
    "torch.hub.load",
}
ONLY_WEIGHTS = {"torch.load", "torch.serialization.load", "torch.hub.load_state_dict_from_url"}
NO_PICKLE = {"numpy.load"}


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint for each loader that is called unsafely, or passed on for others to call."""
    tree = ast.parse(source)
    names = _imported(tree)
    careful = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_careful(node, names)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in careful:
            name = _name(node, names)
            if name in NEVER:
                yield node.lineno, f"{name} runs what the file asks for: keep tensors with torch, the rest as JSON"
            elif name in ONLY_WEIGHTS:
                yield node.lineno, f"{name} without weights_only=True runs what the file asks for"
            elif name in NO_PICKLE:
                yield node.lineno, f"{name} with allow_pickle, or by another name, may run what the file asks for"


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each name that a file imports."""
    full_names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                full_names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module:
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return full_names


def _name(node: ast.expr, names: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = _name(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _is_careful(call: ast.Call, names: Mapping[str, str]) -> bool:
    name = _name(call.func, names)
    options = {word.arg: word.value.value if isinstance(word.value, ast.Constant) else None for word in call.keywords}
    if name in ONLY_WEIGHTS:
        return options.get("weights_only") is True
    visible = len(call.args) < 3 and None not in options  # the third argument is allow_pickle; **options may contain it
    return name in NO_PICKLE and visible and options.get("allow_pickle", False) is False


if __name__ == "__main__":
    bad = [
        f"{path}:{line}: {complaint}"
        for folder in sys.argv[1:]
        for path in sorted(Path(folder).rglob("*.py"))
        for line, complaint in complaints(path.read_text())
    ]
    sys.exit("\n".join(bad) or 0)
