"""docs/reference/messages.md: what hvdtrain and hvdlaunch print about a run, by text.

Messages are found in the source: texts of raised errors, of `print_message` calls, of findings about hosts, and strings
that begin with their severity. Texts that are composed elsewhere are left out.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGE = DOCS / "reference" / "messages.md"
GENERATED = ("messages.md", "options.md", "hvdlaunch.md", "api.md")  # these explain no message
PROGRAMS = {"hvdtrain": "hvdtrain", "launch": "hvdlaunch"}
BAD_INPUT = "2"
# Functions and classes with a message, and the exit status that it leads to.
ERRORS = {
    "BadInput": BAD_INPUT,
    "UnusableFileError": BAD_INPUT,
    "SampleError": BAD_INPUT,
    **dict.fromkeys(("EndOfRun", "SkippedStepsError", "ReplicasDifferError", "Preempted"), ""),
} | dict.fromkeys(
    ("LaunchError", "HostfileError", "TopologyError", "SelectionError", "PlacementError", "CommandError"), BAD_INPUT
)
ERRORS |= dict.fromkeys(("ProcessError", "HostError"), BAD_INPUT)
PRINTERS = ("print_message", "message_line")
# Tables of texts about a host, and the prefix of each.
TABLES = dict.fromkeys(("TROUBLES", "SSH_TROUBLES"), "host HOST: ")
SEVERITY = re.compile(r"(?:hvdlaunch: )?(error|warning|note): (?=\S)")
MAY_HAVE = re.compile(
    "|".join([*ERRORS, *PRINTERS, *TABLES, r"Rule\(", r"Finding\(", r"\"(?:hvdlaunch: )?(?:error|warning|note): "])
)
NAMES = {"STRERROR": "REASON", "ERROR": "REASON", "LINE": "REASON", "RANK_TEXT": "R"}  # of placeholders
CITED_CHARS, CITED_WORDS = 18, 3  # a page of the docs with a piece of a message of this length explains it
MOST_PAGES = 4  # that explain one message: a piece on more pages is an example

HEAD = """\
# Messages

The lines that hvdtrain and hvdlaunch print about a run, as `PROGRAM: SEVERITY: MESSAGE`. Search this page for words of
the line that you see. Words in capitals stand for what the line names, and `...` for a list or a longer text. An error
ends the program with the status given; a warning or a note does not. Remedies for the common ones are in
[troubleshooting](../how-to/troubleshooting.md).
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message."""

    severity: str
    text: str  # with placeholders
    status: str  # of the program that prints it; empty if it continues
    source: Path

    @property
    def key(self) -> str:
        """The sort key: the words, without punctuation and placeholders."""
        return re.sub(r"[^a-z ]", "", re.sub(r"\b[A-Z_]{2,}\b", "", self.text).lower()).strip()


def find_messages(file: Path) -> Iterator[Message]:
    """Yield the messages in a file."""
    source = file.read_text()
    if not MAY_HAVE.search(source):  # parsing all files would take a second
        return
    tree = ast.parse(source)
    constants, seen = _texts(tree.body, {}), set[ast.AST]()
    for statement in tree.body:
        methods = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for scope in methods:
            nodes = list(ast.walk(scope))
            known = constants
            for _ in range(2):  # a text may name another one
                known = constants | _texts(nodes if isinstance(scope, ast.FunctionDef) else (), known)
            for node in nodes:
                for severity, text, status in _messages_of(node, known, seen):
                    yield Message(severity=severity, text=" ".join(text.split()), status=status, source=file)


def _texts(statements: Sequence[ast.AST], known: Mapping[str, str]) -> dict[str, str]:
    """Return the literal texts that these statements assign to names, once each."""
    texts: dict[str, list[str | None]] = {}
    for node in statements:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts.setdefault(node.targets[0].id, []).append(_template(_present(node.value), known))
    return {name: found[0] for name, found in texts.items() if len(found) == 1 and found[0] is not None}


def _present(node: ast.expr) -> ast.expr:
    """The words of an expression that is empty at times."""
    if not isinstance(node, ast.IfExp):
        return node
    branches = [branch for branch in (node.body, node.orelse) if ast.unparse(branch) != "''"]
    if len(branches) == 2:
        return node
    return branches[0].body if isinstance(branches[0], ast.IfExp) else branches[0]


def _messages_of(node: ast.AST, known: Mapping[str, str], seen: set[ast.AST]) -> Iterator[tuple[str, str, str]]:
    """Yield severity, text and status of everything that this node raises or prints."""
    if isinstance(node, ast.Call):
        name, keywords = _last_name(node.func), {word.arg: word.value for word in node.keywords}
        if name in ERRORS and node.args and (text := _template(node.args[0], known)) is not None:
            status = ERRORS[name] or _status(keywords.get("status"))
            yield "note" if status == "0" else "error", text, status
        elif name in PRINTERS and (text := _template(node.args[1], known)) is not None:
            severity = _template(node.args[0], known) or "error"
            yield severity if severity in ("error", "warning", "note") else "warning", text, ""
        elif name == "Rule":
            yield "error", f"--OPTION VALUE: {_template(keywords['text'], known)}.", BAD_INPUT
        elif name == "Finding" and "problem" in keywords:
            problem, remedy = (_template(keywords[word], known) or "..." for word in ("problem", "remedy"))
            severity = _template(keywords["severity"], known) or "error"
            yield severity, f"HOSTS: {problem}. {remedy[:1].upper()}{remedy[1:]}.", ""
    elif isinstance(node, ast.Assign) and _last_name(node.targets[0]) in TABLES and isinstance(node.value, ast.Dict):
        for value in node.value.values:
            if text := _template(value, known):
                yield "error", TABLES[_last_name(node.targets[0])] + re.sub(r"\{(\w+)\}", _named, text), BAD_INPUT
    elif isinstance(node, ast.JoinedStr | ast.Constant) and node not in seen:
        seen.update(ast.iter_child_nodes(node))
        if match := SEVERITY.match(_template(node, known) or ""):
            text = match.string
            yield match[1], text[match.end() :], ""


def _named(match: re.Match[str]) -> str:
    return match[1].upper()


def _status(node: ast.expr | None) -> str:
    statuses = {"FAILED": "1", "TOO_MANY_SKIPPED": "3", "REPLICAS_DIFFER": "4"}
    return str(node.value) if isinstance(node, ast.Constant) else statuses.get(_last_name(node), "1")


def _template(node: ast.AST | None, known: Mapping[str, str]) -> str | None:
    """Return the text of an expression, with placeholders; None if most of it is composed elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.JoinedStr(values=values):
            parts = [_template(value, known) or "" for value in values]
            literal = "".join(str(value.value) for value in values if isinstance(value, ast.Constant))
            return "".join(parts) if re.search(r"\w{3}", literal) else None
        case ast.FormattedValue(value=value):
            return known.get(_last_name(value)) or _placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = _template(left, known), _template(right, known)
            return None if None in texts else "".join(map(str, texts))
        case _:
            return None


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        return "N"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value.upper()
    if isinstance(node, ast.Call) and node.args and _last_name(node.func) != "join":
        return "N" if _last_name(node.func) == "len" else _placeholder(node.args[0])
    name = _last_name(node).strip("_").upper()
    return NAMES.get(name, name) or "..."


def _last_name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def explained_in(text: str, pages: Mapping[str, str]) -> str:
    """Return links to the pages that contain a piece of this message."""
    pieces = re.split(r"\b[A-Z_]{2,}\b|\.\.\.", text)
    pieces = [piece for piece in pieces if len(piece.strip()) >= CITED_CHARS and len(piece.split()) >= CITED_WORDS]
    names = [name for name, page in pages.items() if any(piece.strip() in page for piece in pieces)]
    return ", ".join(f"[{Path(name).stem}]({name})" for name in names) if len(names) <= MOST_PAGES else ""


def render() -> str:
    """Return the page."""
    files = [page for page in sorted(DOCS.rglob("*.md")) if page.name not in GENERATED]
    pages = {os.path.relpath(page, PAGE.parent): page.read_text() for page in files}
    lines = [HEAD]
    for package, program in PROGRAMS.items():
        files = sorted((PROJECT / package).rglob("*.py"))
        found = {message for file in files for message in find_messages(file) if len(message.key.split()) > 1}
        lines += [f"## {program}", "", "| message | status | source | explained in |", "|---|--:|---|---|"]
        for message in sorted(found, key=lambda message: (message.key, message.text, str(message.source))):
            source = message.source.relative_to(PROJECT)
            cell = f"`` {message.severity}: {message.text} ``".replace("|", "\\|")
            link = f"[{source.relative_to(package)}](../../{source})"
            lines.append(f"| {cell} | {message.status or '-'} | {link} | {explained_in(message.text, pages) or '-'} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
