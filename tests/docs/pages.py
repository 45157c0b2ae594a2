"""Reading the documentation as data: its tables and code blocks, and words read off syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PACKAGE: Final = ROOT / "trio_gateway"

Row = dict[str, str]


# Pages ----------------------------------------------------------------------------------------------------


def page(name: str) -> str:
    """The text of a page, named from the folder ``docs``."""
    return (DOCS / name).read_text("utf-8")


def section(name: str, heading: str) -> str:
    """What stands under one heading of a page, up to the next heading of the same or a higher level."""
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", page(name), re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"{name} has no heading {heading!r}"
    return found[2]


def table(name: str, heading: str, number: int = 1) -> list[Row]:
    """One of the tables under a heading, a row as an object from column to cell."""
    tables = re.findall(r"(?:^\|.*\n)+", section(name, heading), re.MULTILINE)
    assert len(tables) >= number, f"{name}: no table {number} under {heading!r}"
    head, _, *body = [_cells(line) for line in tables[number - 1].splitlines()]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def column(name: str, heading: str, title: str) -> list[str]:
    """The words in code style of one column; a cell may have none or several."""
    return [word for row in table(name, heading) for word in words(row[title])]


def words(text: str) -> list[str]:
    """The words in code style of a text."""
    return re.findall(r"`([^`]+)`", text)


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def setting_defaults() -> dict[str, str]:
    """Every setting's default as the page of settings writes it, which is made from the code."""
    found = {}
    prefix = ""
    for line in page("reference/settings.md").splitlines():
        if line.startswith("## "):
            prefix = "".join(words(line)).strip("[]")
        elif line.startswith("| `") and len(cells := line.split(" | ")) > 3:
            found[f"{prefix}.{words(cells[0])[0]}"] = cells[2].strip("`")
    return found


# Code -----------------------------------------------------------------------------------------------------


def modules(*folders: str) -> dict[str, ast.Module]:
    """Syntax trees of the package's modules by path, only those below some folders or files of it."""
    paths = [path for path in PACKAGE.rglob("*.py") if not folders or _below(path, folders)]
    assert paths
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def _below(path: Path, folders: tuple[str, ...]) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def assigned(module: str, name: str) -> ast.expr:
    """What a module of the package assigns to one of its names."""
    (tree,) = modules(module).values()
    (found,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None
    ]
    return found


def fields_of(module: str, name: str) -> list[str]:
    """The annotated names of a class, or the members of an enumeration, in their order."""
    (tree,) = modules(module).values()
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    targets = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    members = [node.targets[0] for node in found.body if isinstance(node, ast.Assign)]
    return [ast.unparse(target) for target in (*targets, *members)]


def constants(tree: ast.AST, kind: type[str] | type[bytes]) -> Iterator[str]:
    """The string or bytes constants of a tree, docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, kind):
            value = node.value
            yield value.decode("latin-1") if isinstance(value, bytes) else value
