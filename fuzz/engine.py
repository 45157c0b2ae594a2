"""One target under atheris: ``python -m fuzz.engine NAME CORPUS FINDINGS [options of libFuzzer]``.

Does not return: libFuzzer ends the process, with a status other than 0 after a finding.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

SLOW: Final = 2.0  # seconds of CPU for one input of at most a few KiB: something is not linear


class TooSlow(Exception):
    """One input took too much of the CPU."""


def watched(check: Callable[[bytes], None], findings: Path) -> Callable[[bytes], None]:
    """Answer the check with a bound of the CPU time for one input, which keeps inputs that fail.

    libFuzzer keeps them too, under the same name, unless its own alarm ends it while it ends.
    """

    def run(data: bytes) -> None:
        began = time.process_time()
        try:
            check(data)
            if time.process_time() - began > SLOW:
                raise TooSlow
        except BaseException:
            name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
            findings.joinpath(f"crash-{name}").write_bytes(data)
            raise

    return run


def main() -> None:
    """Fuzz until libFuzzer's options say that it is enough."""
    atheris = importlib.import_module("atheris")
    name, corpus, findings, *options = sys.argv[1:]
    for module in [known for known in sys.modules if known.split(".")[0] == "json"]:
        del sys.modules[module]  # to be watched, where a target compares with it
    # Only what is imported in this block is watched; the targets' own comparing is not of interest.
    with atheris.instrument_imports(include=["trio_gateway", "h11", "json"]):
        target = importlib.import_module("fuzz.target").load(name)
    folder = Path(corpus)
    words = folder.parent / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words), encoding="ascii")
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number:03d}").write_bytes(seed)
    own = [f"-dict={words}", f"-max_len={target.max_bytes}", f"-artifact_prefix={findings}{os.sep}"]
    atheris.Setup(
        [sys.argv[0], *own, "-len_control=20", *options, corpus], watched(target.check, Path(findings))
    )
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
