"""Every page can be found: from the index of its folder, and that from the index of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS

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
