"""The shorter way to run flake8-async says what flake8-async says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).parents[1] / ".ci" / "lint_async.py"
WRONG: Final = """
import trio

async def waits_for_nothing():
    with trio.move_on_after(3):
        pass

async def swallows(timeout=3):
    try:
        await trio.sleep(0)
    except BaseException:
        pass

async def silent():
    with trio.CancelScope():  # noqa: ASYNC100
        yield 1

async def returns_early(ready):
    if ready:
        return
    await trio.sleep(1)
"""


def said(*command: str) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def test_the_shorter_way_finds_what_the_library_finds(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    code, text = said(str(SCRIPT), "--enable=ASYNC,ASYNC910", str(wrong))
    assert (code, text) == said("-m", "flake8_async", "--enable=ASYNC,ASYNC910", str(wrong))
    assert code == 1
    assert {"ASYNC100", "ASYNC101", "ASYNC103", "ASYNC109", "ASYNC910"} <= set(text.split())


def test_the_shorter_way_changes_nothing(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    assert said(str(SCRIPT), "--autofix=ASYNC", str(wrong))[0] == 1
    assert wrong.read_text() == WRONG
