"""Lending between the processes of one machine: units of named things, never more than there are of each.

`_book` has what is lent and decides who is next; `_broker` has it in the supervisor, `_borrower` is the
other end in each process, and `_messages` is what they say. Admission borrows, and knows only the port.
"""

from ._book import LendingBook, Loan, Recall
from ._borrower import Borrower, Listener
from ._broker import Broker
from ._crowd import Crowd
from ._messages import Said, Told
from ._owners import Owners
from ._place import Place

__all__ = [
    "Borrower",
    "Broker",
    "Crowd",
    "LendingBook",
    "Listener",
    "Loan",
    "Owners",
    "Place",
    "Recall",
    "Said",
    "Told",
]
