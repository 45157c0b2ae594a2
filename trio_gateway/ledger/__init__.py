"""What is accounted for: the equations of accepted work, and one record per exchange.

Records are kept by a `Ledger`, if a database is configured: in a journal first
(`_journal`, whose lines `_lines` frames and `_rows` writes), from where `_replay` takes
them into the database (`_store`).
"""

from ._books import Books, conservation_errors
from ._histogram import LAG_BOUNDS, Histogram
from ._ledger import Ledger, LedgerSettings, read_usage
from ._record import EventMarks, Record, Tally, TokensOf, four_bytes_each
from ._replay import LogPort
from ._rows import DIMENSIONS, GATEWAY_CRASHED, KINDS, UsageRow, record_json
from ._times import Names, Times
from ._usage_page import FORMATS, parse_dimensions, parse_moment, usage_page

__all__ = [
    "DIMENSIONS",
    "FORMATS",
    "GATEWAY_CRASHED",
    "KINDS",
    "LAG_BOUNDS",
    "Books",
    "EventMarks",
    "Histogram",
    "Ledger",
    "LedgerSettings",
    "LogPort",
    "Names",
    "Record",
    "Tally",
    "Times",
    "TokensOf",
    "UsageRow",
    "conservation_errors",
    "four_bytes_each",
    "parse_dimensions",
    "parse_moment",
    "read_usage",
    "record_json",
    "usage_page",
]
