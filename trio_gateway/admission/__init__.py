"""Bounded acceptance: a place now, a position in a queue, or a refusal with a reason."""

from ._controller import (
    TIERS,
    Admission,
    AdmissionLimits,
    AdmissionStatistics,
    Lease,
    TenantShare,
    Ticket,
)

__all__ = ["TIERS", "Admission", "AdmissionLimits", "AdmissionStatistics", "Lease", "TenantShare", "Ticket"]
