"""What one of several processes has of the limits that are split by number."""

from __future__ import annotations

from ..config import KeySettings, Settings, TenantSettings
from ..units import MiB, Part


def settings_of(settings: Settings, part: Part) -> Settings:
    """Answer the settings with the limits of one process.

    Where one request alone may need more than a part, it has as much as that. Rates that a cluster counts are
    not split.
    """
    if part.of == 1:
        return settings
    least = int(settings.cluster.url is not None)  # there a request waits before it is placed
    limits, admission, delivery = settings.limits, settings.admission, settings.delivery
    return settings.model_copy(
        update={
            "limits": limits.model_copy(
                update={
                    "connections": max(part.share(limits.connections), 1),
                    "unplaced_bytes": max(part.share(limits.unplaced_bytes), limits.body_bytes),
                }
            ),
            "admission": admission.model_copy(
                update={
                    "max_queued": max(part.share(admission.max_queued), least),
                    "max_queued_bytes": max(
                        part.share(admission.max_queued_bytes),
                        min(limits.body_bytes, admission.max_queued_bytes),
                    ),
                }
            ),
            "delivery": delivery.model_copy(
                update={
                    "total_buffer_bytes": max(
                        part.share(delivery.total_buffer_bytes), limits.answer_bytes, delivery.buffer_bytes
                    )
                }
            ),
            "database": settings.database.model_copy(
                update={"journal_bytes": max(part.share(settings.database.journal_bytes), MiB)}
            ),
            "tenants": tuple(tenant_of(tenant, part, settings) for tenant in settings.tenants),
        }
    )


def tenant_of(tenant: TenantSettings, part: Part, settings: Settings) -> TenantSettings:
    """Answer a tenant with the limits of one process, but for its concurrency and its deadlines."""
    if part.of == 1:
        return tenant
    if settings.cluster.url is not None:
        return tenant.model_copy(
            update={"max_queued": max(part.share(tenant.max_queued, tenant.id), min(tenant.max_queued, 1))}
        )
    update = {
        "max_queued": part.share(tenant.max_queued, tenant.id),
        "keys": tuple(_key_of(key, part) for key in tenant.keys),
        **_rates(tenant, part),
    }
    return tenant.model_copy(update=update)


def _key_of(key: KeySettings, part: Part) -> KeySettings:
    return key.model_copy(update=_rates(key, part))


def _rates(owner: TenantSettings | KeySettings, part: Part) -> dict[str, int]:
    rates = {name: getattr(owner, name) for name in ("requests_per_minute", "tokens_per_minute")}
    return {name: max(part.share(rate, owner.id), 1) for name, rate in rates.items() if rate is not None}
