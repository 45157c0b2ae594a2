"""Every page can be found: from the index of its folder, and that from the index of all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PACKAGE, ROOT, blocks, page, words

FOLDERS = sorted(path.parent for path in DOCS.glob("*/README.md"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_index_names_every_page_of_its_folder(folder: Path) -> None:
    index = (folder / "README.md").read_text("utf-8")
    pages = [path.name for path in folder.glob("*.md") if path.name != "README.md"]
    assert pages
    assert not [name for name in pages if f"({name})" not in index and f"({name}#" not in index]


def test_the_index_of_all_names_every_folder_and_page_beside_it() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    targets = [f"{folder.name}/README.md" for folder in FOLDERS]
    targets += [path.name for path in DOCS.glob("*.md") if path.name != "README.md"]
    assert not [target for target in targets if f"({target})" not in index]


def test_every_folder_has_an_index() -> None:
    assert {path.parent for path in DOCS.glob("*/*.md")} == set(FOLDERS)


STEP = re.compile(r"^(?:\d+\.|-) \*\*`(\w+)/`\*\*(.*?)(?=^\d+\. |^- |^#|\Z)", re.MULTILINE | re.DOTALL)


def test_every_module_that_the_reading_order_names_is_in_its_room() -> None:
    named = [
        PACKAGE / room / f"{module}.py"
        for room, text in STEP.findall(page("reading-order.md"))
        for module in words(text)
        if module.startswith("_")
    ]
    assert len(named) > 20
    assert not [path for path in named if not path.exists()]


def test_the_glossary_is_in_order_and_defines_each_word_once() -> None:
    terms = [term.lower() for term in re.findall(r"^\*\*(.+?)\.\*\*", page("glossary.md"), re.MULTILINE)]
    assert terms == sorted(set(terms))


def test_the_first_commands_of_the_readme_are_the_demo_and_the_tests() -> None:
    first = blocks((ROOT / "README.md").read_text("utf-8"), "console")[0]
    assert first == "$ make demo\n$ make test\n"


def test_no_table_is_torn_apart() -> None:
    """What follows an empty line is a table of its own, and without a line below its head none at all."""
    pages = {path: f"\n{path.read_text('utf-8')}" for path in DOCS.rglob("*.md")}
    torn = [
        f"{path.relative_to(DOCS)}: {row}"
        for path, text in pages.items()
        for row, below in re.findall(r"^(?!\|).*\n(\|.*)\n(.*)", text, re.MULTILINE)
        if not re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", below)
    ]
    assert not torn
