"""Runs flake8-async, which finds out where everything stands anew for each of its seven visitors of a file.

That is for visitors that change what they visit, and takes more than half of its time. Here nothing is
changed, so it is found out once a file. Nor is a visitor led through blanks, of which there are most, and for
which none asks. What is said is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from flake8_async import main
from flake8_async.base import Error
from flake8_async.runner import Flake8AsyncRunner_cst
from libcst import SimpleWhitespace
from libcst.metadata import MetadataWrapper


def _look(self: Flake8AsyncRunner_cst) -> Iterable[Error]:
    wrapped = MetadataWrapper(self.module, unsafe_skip_copy=True)
    visitors = (*self.utility_visitors, *self.visitors)
    for visitor in visitors:
        wrapped.visit(visitor)
    yield from self.state.problems
    if not self.options.disable_noqa:
        self.noqas = visitors[-1].noqas


def _pass_by(self: SimpleWhitespace, visitor: object) -> SimpleWhitespace:
    return self


SimpleWhitespace.visit = _pass_by  # type: ignore[method-assign,assignment]
if any(argument.startswith("--autofix") for argument in sys.argv):
    sys.exit("this only looks; python -m flake8_async changes files")
Flake8AsyncRunner_cst.run = _look  # type: ignore[method-assign]
sys.exit(main())
