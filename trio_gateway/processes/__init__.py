"""Several processes that serve the same clients: the one that starts them, and the door to all of them.

`_supervisor` binds the sockets, starts the processes and keeps them running; what they share, it lends
(`trio_gateway.lending`). `_operations` is the operators' port of all of them: it asks each (`_child`) and
puts their answers together (`_merge`). `_internal` passes on what workers say that register.
"""

from ._supervisor import ProcessEnded, Supervisor

__all__ = ["ProcessEnded", "Supervisor"]
