"""A tenant: who pays and is limited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of the configuration.

    Attributes:
        tiers: what it may ask for in ``X-Gateway-Priority``.
        models: public names it may use; ``*`` means all.
        default_timeout, max_timeout: seconds; None: the server's.
        engine_fields: may send body fields that steer the engine itself.
    """

    id: str
    weight: float = 1.0
    tiers: tuple[str, ...] = ("interactive", "standard", "batch")
    models: frozenset[str] = frozenset({"*"})
    default_timeout: float | None = None
    max_timeout: float | None = None
    engine_fields: bool = False

    def may_use(self, model: str) -> bool:
        """Whether the tenant may use a public model."""
        return "*" in self.models or model in self.models

    @property
    def default_tier(self) -> str:
        """The tier of a request that names none."""
        return "standard" if "standard" in self.tiers else self.tiers[0]

    def narrowed(self, models: frozenset[str], tiers: tuple[str, ...]) -> Tenant:
        """Answer the tenant as somebody sees it who may use no more than these of its models and tiers."""
        if "*" in models:
            models = self.models
        elif "*" not in self.models:
            models &= self.models
        left = tuple(tier for tier in self.tiers if tier in tiers)
        if models is self.models and left == self.tiers:
            return self  # as most keys have it, of which there may be very many
        return replace(self, models=models, tiers=left)


ANONYMOUS: Final = "anonymous"
