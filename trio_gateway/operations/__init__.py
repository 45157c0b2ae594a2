"""What operators can see and do in a running gateway, without HTTP: the doors in `admin/` are in front of it.

Reading: `_requests`, `_standing`, `_pulse` (the live feed), `_statistics`. Acting: `_operations` has
every lever, `_configuration` changes settings (`_changes` compares them, `_making` turns them into what
the parts take, `_apply` puts that in force), and `_audit` keeps the trail.
"""

from ._apply import Prepared, take_callers
from ._audit import Trail, open_audit_table
from ._changes import in_force
from ._house import House
from ._making import (
    NOTHING_STORED,
    Callers,
    admission_limits,
    attempt_limits,
    exchange_limits,
    fleet_settings,
    generate_settings,
    keys_of,
    kubernetes_access,
    limits_of,
    make_callers,
    make_keyring,
    make_worker,
    routes_of,
    server_limits,
    share_of,
    socket_settings,
    upstream_limits,
)
from ._operations import Operations
from ._part import settings_of
from ._sharing import SharedSecrets, Sharing
from ._signals import reload_at_signals, version_of
from ._statistics import statistics

__all__ = [
    "NOTHING_STORED",
    "Callers",
    "House",
    "Operations",
    "Prepared",
    "SharedSecrets",
    "Sharing",
    "Trail",
    "admission_limits",
    "attempt_limits",
    "exchange_limits",
    "fleet_settings",
    "generate_settings",
    "in_force",
    "keys_of",
    "kubernetes_access",
    "limits_of",
    "make_callers",
    "make_keyring",
    "make_worker",
    "open_audit_table",
    "reload_at_signals",
    "routes_of",
    "server_limits",
    "settings_of",
    "share_of",
    "socket_settings",
    "statistics",
    "take_callers",
    "upstream_limits",
    "version_of",
]
