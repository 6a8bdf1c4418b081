"""docs/reference/api.md, from the source of the public names: nothing that needs torch is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hvdtrain
from scripts.docs.markdown import code, options_as_code, table

PACKAGE = Path(hvdtrain.__file__).parent
LINE = 100  # characters of a signature

HEAD = """\
# Python API

`import hvdtrain` gives these names. A program calls `hvdtrain.start`, makes a `Training` from its model, its `Task` and
its data, and iterates over it: [train your own model](../tutorials/own-model.md). All other modules may change without
notice: [compatibility](compatibility.md). Shapes are in brackets after a tensor; `N` is the number of samples of a
batch on this rank. The examples are one program in one process, from top to bottom; `run` is what `main` receives.
"""
TYPES = """\
## Types

Names in the signatures above that are not imported from hvdtrain:
"""
SETTINGS = (
    "Fields and defaults: [options of the programs](options.md). A subclass adds fields, which are options too.\n"
)


def render() -> str:
    """Return the page."""
    lines = [HEAD, *table(("name", "what it is"), map(_summary, hvdtrain.__all__))]
    for name in hvdtrain.__all__:
        node = _definition(name)
        lines += [f"## {name}", ""]
        if isinstance(node, ast.ClassDef):
            lines += _class(node)
            lines += [SETTINGS] if name == "Settings" else []
        else:
            lines += ["```python", f"hvdtrain.{_signature(node)}", "```", "", _doc(node), ""]
    lines += [TYPES, *table(("type", "is", "meaning"), _types())]
    return "\n".join(lines).rstrip() + "\n"


def _types() -> Iterator[tuple[str, str, str]]:
    """Yield the names of types in signatures: those of core/task.py, and the forms of samples."""
    for line in (PACKAGE / "core/task.py").read_text().splitlines():
        name, is_type, value = line.partition(" = ")
        if is_type and name.isidentifier() and name[0].isupper() and not name.isupper():
            kind, _, meaning = value.partition("  # ")
            yield code(name), code(kind), meaning
    yield code("Data"), "a form of samples", "see [Run.training](#runtraining)"


def _summary(name: str) -> tuple[str, str]:
    first = _doc(_definition(name)).split("\n\n")[0]
    return f"[`{name}`](#{name.lower()})", " ".join(first.split())


def _definition(name: str) -> ast.ClassDef | ast.FunctionDef:
    file = PACKAGE.joinpath(*hvdtrain._MODULES[name].split(".")).with_suffix(".py")
    [found] = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    ]
    found.source = file.read_text().splitlines()  # type: ignore[union-attr]  # for comments, which ast leaves out
    return found


def _class(node: ast.ClassDef) -> list[str]:
    """Describe the class, its fields with their comments, and its public methods."""
    lines = [_doc(node), ""]
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    if (made := [one for one in methods if one.name == "__init__"]) and (text := _doc(made[0])):
        lines += [text, ""]
    if node.name != "Settings" and (rows := list(_fields(node))):
        lines += table(("field", "default", "meaning"), rows)
    for method in methods:
        if not method.name.startswith("_"):
            is_property = any(isinstance(one, ast.Name) and one.id == "property" for one in method.decorator_list)
            signature = f"{method.name}: {_type(method.returns)}" if is_property else _signature(method)
            lines += [f"### {node.name}.{method.name}", "", "```python", signature, "```", "", _doc(method), ""]
    return lines


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield name and type, default, and meaning: the comment at the end of the line."""
    source: list[str] = node.source  # type: ignore[attr-defined]
    for field in node.body:
        if isinstance(field, ast.AnnAssign | ast.Assign):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            comment = source[(field.end_lineno or 0) - 1].partition("  # ")[2]
            kind = f": {_type(field.annotation)}" if isinstance(field, ast.AnnAssign) else ""
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield code(target.id + kind), code("" if field.value is None else ast.unparse(field.value)), comment


def _signature(node: ast.FunctionDef) -> str:
    """Return the function's name, arguments and return type, in one line if it is short."""
    arguments = [one for one in _arguments(node.args) if one != "self"]
    one_line = f"{node.name}({', '.join(arguments)}) -> {_type(node.returns)}"
    if len(one_line) <= LINE:
        return one_line
    return "\n".join([f"{node.name}(", *(f"    {one}," for one in arguments), f") -> {_type(node.returns)}"])


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yield each argument as written, with the star before keyword-only ones."""
    padded = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(arguments.args, padded, strict=True):
        yield ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield ast.unparse(argument) + ("" if value is None else f" = {ast.unparse(value)}")


def _type(node: ast.expr | None) -> str:
    return "None" if node is None else ast.unparse(node).strip("'")


def _doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the docstring in Markdown, with its examples as code."""
    parts = (ast.get_docstring(node) or "").split("\n\n")
    return "\n\n".join(f"```python\n{one}\n```" if one.startswith(">>> ") else options_as_code(one) for one in parts)
