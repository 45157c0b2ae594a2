"""Bounded acceptance: a place now, a position in a queue, or a refusal with a reason."""

from ._controller import (
    REASONS,
    TIERS,
    Admission,
    AdmissionLimits,
    AdmissionStatistics,
    Lease,
    Line,
    PoolStatistics,
    TenantShare,
    Ticket,
)

__all__ = [
    "REASONS",
    "TIERS",
    "Admission",
    "AdmissionLimits",
    "AdmissionStatistics",
    "Lease",
    "Line",
    "PoolStatistics",
    "TenantShare",
    "Ticket",
]
