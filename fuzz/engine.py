"""One target under atheris: ``python -m fuzz.engine NAME CORPUS [libFuzzer's options]``.

Does not return: libFuzzer ends the process, with a status other than 0 after a finding.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import atheris

SLOW: Final = 2.0  # seconds of CPU for one input of at most a few KiB: something is not linear


class TooSlow(Exception):
    """One input took too long."""


def main() -> None:
    """Fuzz until libFuzzer's options say that it is enough."""
    name, corpus, *options = sys.argv[1:]
    for module in [name for name in sys.modules if name.split(".")[0] == "json"]:
        del sys.modules[module]  # to be watched, where a target compares with it
    # Only what is imported in this block is watched; the targets' own comparing is not of interest.
    with atheris.instrument_imports(include=["trio_gateway", "h11", "json"]):
        from fuzz.target import load

        target = load(name)
    folder = Path(corpus)
    words = folder.parent / "words"
    words.write_text("\n".join(f'"{_escaped(word)}"' for word in target.words) + "\n", encoding="ascii")
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number:03d}").write_bytes(seed)

    def run(data: bytes) -> None:
        began = time.process_time()
        target.check(data)
        if time.process_time() - began > SLOW:
            raise TooSlow

    atheris.Setup(
        [sys.argv[0], f"-dict={words}", "-len_control=20", f"-max_len={target.max_bytes}", *options, corpus],
        run,
        enable_python_coverage=True,
    )
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
