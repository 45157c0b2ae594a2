"""What is accounted for: the equations of accepted work, and one record per exchange."""

from ._books import Books, conservation_errors
from ._record import EventMarks, Record, Tally

__all__ = ["Books", "EventMarks", "Record", "Tally", "conservation_errors"]
