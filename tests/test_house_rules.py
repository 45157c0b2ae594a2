"""What no linter checks: rules of this house, read off syntax trees, tracked files and the documentation.

Each rule is a function from text to a list of complaints. The first half of the tests shows that each rule
sees what it forbids, on small samples; the second half applies the rules to the project.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest

from trio_gateway.config import parse_settings

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "trio_gateway"
SKIPPED_FOLDERS: Final = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}

# Rules on syntax trees --------------------------------------------------------------------------------------


def unlimited_shields(source: str) -> list[str]:
    """A shield without a limit lets a peer that never answers hold a task for ever."""
    return [
        f"line {node.lineno}: write move_on_after(limit, shield=True)"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Call) and _is_unlimited_shield(node))
        or (isinstance(node, ast.Assign) and _switches_a_shield_on(node))
    ]


def loose_async_generators(source: str) -> list[str]:
    """An async generator that is not finished is cleaned up elsewhere, in another task, at another time."""
    return [
        f"line {node.lineno}: async generator {node.name} without @asynccontextmanager"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef)
        and any(isinstance(inner, ast.Yield) for inner in _own_nodes(node))
        and not any(_last_name(decorator) == "asynccontextmanager" for decorator in node.decorator_list)
    ]


def timeout_parameters(source: str) -> list[str]:
    """Deadlines are scopes: the caller who knows how long it may take says so around the call."""
    return [
        f"line {node.lineno}: {node.name} has a parameter {argument.arg}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg == "timeout"
    ]


def private_imports(source: str, path: str) -> list[str]:
    """A module whose name begins with an underscore belongs to its room; others use what the room exports.

    Args:
        source: text of the module.
        path: where it stands, with slashes, from the root. A test may look into the room its folder mirrors.
    """
    parts = Path(path).with_suffix("").parts
    own_room = parts[1] if len(parts) > 2 else None
    return [
        f"line {line}: {target} is private to trio_gateway.{room}"
        for line, target in _imported_names(source, parts)
        if (room := _room_of_private(target)) is not None and room != own_room
    ]


def undeclared_imports(source: str, path: str, declared: set[str]) -> list[str]:
    """What the package imports is named in pyproject.toml, not merely brought along by something else."""
    return [
        f"line {line}: {target.split('.')[0]} is not a declared dependency"
        for line, target in _imported_names(source, Path(path).with_suffix("").parts)
        if target.split(".")[0] not in declared | set(sys.stdlib_module_names) | {"trio_gateway"}
    ]


def _is_unlimited_shield(call: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if _is_constant(keywords.get("shield"), None, False):
        return False
    match _last_name(call.func):
        case "CancelScope":
            return "deadline" not in keywords or _is_infinite(keywords["deadline"])
        case "move_on_after" | "move_on_at" | "fail_after" | "fail_at":
            return any(_is_infinite(limit) for limit in (*call.args, *keywords.values()))
    return False


def _switches_a_shield_on(assignment: ast.Assign) -> bool:
    names = {target.attr for target in assignment.targets if isinstance(target, ast.Attribute)}
    return "shield" in names and not _is_constant(assignment.value, False)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_constant(node: ast.expr | None, *values: object) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None if node is None else ...
    return any(value is expected for expected in values)


def _is_infinite(limit: ast.expr) -> bool:
    return ast.unparse(limit) in {"inf", "math.inf", "float('inf')"}


def _own_nodes(function: ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def _imported_names(source: str, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each import; for ``from a import b`` that is ``a.b``."""
    package = parts if parts[-1] == "__init__" else parts[:-1]
    package = tuple(part for part in package if part != "__init__")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def _room_of_private(target: str) -> str | None:
    names = target.split(".")
    is_private = len(names) > 2 and names[0] == "trio_gateway" and names[2].startswith("_")
    return names[1] if is_private and not names[2].startswith("__") else None


# Rules on text ----------------------------------------------------------------------------------------------

# Put together here, so that this file does not contain what it forbids.
_PLACES: Final = ("work", "root", "tmp", "home", "Users", "opt/pypi", "opt/wheels")
_HOSTS: Final = ("pypi", "pythonhosted", "debian", "npmjs", "yarnpkg", "crates")
MACHINE_PATH: Final = re.compile(r"(?<![\w.~}\)-])/(?:" + "|".join(_PLACES) + r")/[\w.]")
INDEX_HOST: Final = re.compile(r"\b(?:[\w-]+\.)*(?:" + "|".join(_HOSTS) + r")\.(?:org|io|com)\b")


def traces_of_a_machine(text: str) -> list[str]:
    """A path of somebody's machine or the host of a package index: true in one place, wrong in all others."""
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in (MACHINE_PATH, INDEX_HOST)
        if (match := pattern.search(line))
    ]


def unpinned_lines(text: str) -> list[str]:
    """A constraints file has pins with hashes, and nothing that says where to fetch them."""
    code = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    entries = re.split(r"(?<!\\)\n", "\n".join(code))
    return [
        entry.splitlines()[0]
        for entry in entries
        if not re.match(r"[\w.\[\]-]+==\S+( ;[^\\]*)?( \\\n    --hash=sha256:[0-9a-f]{64})+$", entry)
    ]


_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for target in _LINK.findall(_FENCE.sub("", text)):
        place, _, anchor = unquote(target).partition("#")
        if "://" in place or place.startswith("mailto:"):
            continue
        file = (page.parent / place).resolve() if place else page
        if not file.exists():
            found.append(f"{target} leads nowhere")
        elif anchor and anchor not in _anchors(text if file == page else file.read_text("utf-8")):
            found.append(f"{target} names a heading that is not there")
    return found


def configuration_examples(text: str) -> list[str]:
    """The TOML blocks of a page, and those that a shell block writes into a file."""
    blocks = re.findall(r"^```toml\n(.*?)^```|<<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL)
    placeholder = re.compile(r"sha256:<[^>]*>")
    return [placeholder.sub("sha256:" + "0" * 64, fenced or written) for fenced, written in blocks]


def _anchors(text: str) -> set[str]:
    """The anchors that Markdown renderers make of headings: lower case, no punctuation, blanks to hyphens."""
    headings = re.findall(r"^#+ +(.*?) *#*$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# What the project consists of -------------------------------------------------------------------------------


def tracked_files() -> list[Path]:
    """The files under version control; in a copy without history, all but caches and the environment."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z"]
        listing = subprocess.run(command, check=True, capture_output=True).stdout.decode()
        files = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def expect_no_complaints(files: list[Path], rule: Callable[[Path, str], list[str]]) -> None:
    found = [
        f"{relative(path)}: {complaint}"
        for path in files
        if b"\0" not in (content := path.read_bytes())
        for complaint in rule(path, content.decode("utf-8"))
    ]
    assert files
    assert not found, "\n".join(found)


def declared_imports(path: str) -> set[str]:
    """What a module may import: the dependencies and extras, those of `dev` only in the shipped fakes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = dict(project["optional-dependencies"])
    if not path.startswith("trio_gateway/testing/"):
        del extras["dev"]
    names = [re.split(r"[\s\[<>=!~;]", line)[0] for line in sum(extras.values(), project["dependencies"])]
    renamed = {"opentelemetry-proto": "opentelemetry"}
    bound_together = {"annotated_types", "pydantic_core"}  # pydantic's own, part of its documented interface
    return {renamed.get(name, name).replace("-", "_") for name in names} | bound_together


# The rules see what they forbid -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "trio.CancelScope(shield=True)",
        "CancelScope(shield=flag)",
        "CancelScope(deadline=math.inf, shield=True)",
        "scope.shield = True",
        "trio.move_on_after(math.inf, shield=True)",
        "trio.move_on_at(deadline=float('inf'), shield=True)",
    ],
)
def test_a_shield_without_a_limit_is_seen(source: str) -> None:
    assert unlimited_shields(source)


@pytest.mark.parametrize(
    "source",
    [
        "trio.CancelScope(deadline=limit, shield=True)",
        "trio.CancelScope()",
        "trio.CancelScope(shield=False)",
        "trio.move_on_after(2, shield=True)",
        "scope.shield = False",
    ],
)
def test_a_shield_with_a_limit_is_allowed(source: str) -> None:
    assert not unlimited_shields(source)


def test_an_async_generator_is_seen_unless_it_is_a_context_manager() -> None:
    generator = "async def f():\n    yield 1\n"
    assert loose_async_generators(generator)
    assert loose_async_generators("@wrap\n" + generator)
    assert not loose_async_generators("@contextlib.asynccontextmanager\n" + generator)
    assert not loose_async_generators("async def f():\n    def g():\n        yield 1\n")


def test_a_timeout_parameter_is_seen_on_async_functions_only() -> None:
    assert timeout_parameters("async def f(*, timeout=3): ...")
    assert timeout_parameters("async def f(timeout): ...")
    assert not timeout_parameters("def f(timeout): ...\nasync def g(limit): ...")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from trio_gateway.wire._sse import Event", "trio_gateway/flow/_scope.py"),
        ("from trio_gateway.wire import _sse", "trio_gateway/flow/__init__.py"),
        ("import trio_gateway.wire._sse", "trio_gateway/gateway.py"),
        ("from ..wire._sse import Event", "trio_gateway/flow/_scope.py"),
        ("from .wire import _sse", "trio_gateway/gateway.py"),
        ("from trio_gateway.wire._sse import Event", "tests/flow/test_scope.py"),
        ("from trio_gateway.wire._sse import Event", "bench/scenarios/tokens.py"),
    ],
)
def test_a_private_module_of_another_room_is_seen(source: str, path: str) -> None:
    assert private_imports(source, path)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("from trio_gateway.wire._sse import Event", "trio_gateway/wire/__init__.py"),
        ("from ._sse import Event", "trio_gateway/wire/__init__.py"),
        ("from ._sse import Event", "trio_gateway/wire/_relay.py"),
        ("from trio_gateway.wire import Event", "trio_gateway/flow/_scope.py"),
        ("from ..wire import Event", "trio_gateway/flow/_scope.py"),
        ("from trio_gateway import __version__", "trio_gateway/cli.py"),
        ("from trio_gateway.wire._sse import Event", "tests/wire/test_sse.py"),
    ],
)
def test_a_room_may_use_its_own_private_modules(source: str, path: str) -> None:
    assert not private_imports(source, path)


def test_an_import_that_nobody_declared_is_seen() -> None:
    path = "trio_gateway/wire/_sse.py"
    assert undeclared_imports("import requests.adapters", path, {"trio"})
    assert not undeclared_imports("import os, trio", path, {"trio"})
    assert not undeclared_imports("from . import _lines\nfrom ..errors import x", path, set())


@pytest.mark.parametrize(
    "parts",
    [
        ("see ", "/ro", "ot/notes"),
        ("'", "/tm", "p/socket'"),
        ("cd ", "/ho", "me/ada"),
        ("https://py", "pi.org/simple"),
        ("files.python", "hosted.org"),
    ],
)
def test_traces_of_a_machine_are_seen(parts: tuple[str, ...]) -> None:
    assert traces_of_a_machine("first line\n" + "".join(parts))


@pytest.mark.parametrize(
    "parts",
    [
        ("docs/wo", "rk/notes"),
        ("http+unix:///run/engine.sock",),
        ("./t", "mp/x"),
        ("${TMPDIR}/t", "mp/x"),
    ],
)
def test_ordinary_paths_are_no_traces_of_a_machine(parts: tuple[str, ...]) -> None:
    assert not traces_of_a_machine("".join(parts))


def test_a_constraint_without_a_hash_or_with_an_index_is_seen() -> None:
    hashed = "trio==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n    # via us\n"
    assert not unpinned_lines("# comment\n" + hashed + hashed.replace("==1.0", "==1.0 ; os_name == 'nt'"))
    assert unpinned_lines(hashed + "h11==1.0\n") == ["h11==1.0"]
    assert unpinned_lines("--index-url somewhere\n" + hashed) == ["--index-url somewhere"]
    assert unpinned_lines(hashed.replace("==", ">="))


def test_a_broken_documentation_link_is_seen() -> None:
    page = ROOT / "README.md"
    assert broken_links(page, "[a](docs/no-such-page.md)")
    assert broken_links(page, "# One\n[a](#two)")
    assert not broken_links(page, "# One, two\n[a](#one-two) [b](LICENSE) [c](https://example.com/x)")
    assert not broken_links(page, "```\n[a](nowhere)\n```")


# The project keeps the rules --------------------------------------------------------------------------------


def test_no_shield_in_the_package_is_without_a_limit() -> None:
    expect_no_complaints(python_files("trio_gateway"), lambda _, text: unlimited_shields(text))


def test_the_package_has_no_async_generators_but_context_managers() -> None:
    expect_no_complaints(python_files("trio_gateway"), lambda _, text: loose_async_generators(text))


def test_no_async_function_of_the_package_takes_a_timeout() -> None:
    expect_no_complaints(python_files("trio_gateway"), lambda _, text: timeout_parameters(text))


def test_no_room_imports_another_rooms_private_modules() -> None:
    files = python_files("trio_gateway", "tests", "bench", "fuzz")
    expect_no_complaints(files, lambda path, text: private_imports(text, relative(path)))


def test_every_import_of_the_package_is_a_declared_dependency() -> None:
    def rule(path: Path, text: str) -> list[str]:
        return undeclared_imports(text, relative(path), declared_imports(relative(path)))

    expect_no_complaints(python_files("trio_gateway"), rule)


def test_no_tracked_file_names_a_machine_or_a_package_index() -> None:
    expect_no_complaints(tracked_files(), lambda _, text: traces_of_a_machine(text))


def test_every_constraint_is_one_version_with_hashes_and_no_address() -> None:
    files = sorted((ROOT / "constraints").glob("*.txt"))
    expect_no_complaints(files, lambda _, text: unpinned_lines(text))


def test_every_link_inside_the_documentation_leads_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    expect_no_complaints(pages, broken_links)


def test_the_documentation_walks_through_every_room() -> None:
    text = (ROOT / "docs" / "reading-order.md").read_text("utf-8")
    rooms = {path.parent.name + "/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert not {name for name in rooms | modules if f"`{name}`" not in text}


def test_the_documentation_lists_every_decision_and_numbers_them_without_gaps() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text("utf-8")
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    assert not [name for name in records if f"({name})" not in index]


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/container.md"])
def test_the_configuration_examples_of_the_documentation_are_accepted(page: str) -> None:
    examples = configuration_examples((ROOT / page).read_text("utf-8"))
    assert examples
    for example in examples:
        parse_settings(example, name=page)
