"""The whole configuration, as one value."""

from __future__ import annotations

import os

from trio_gateway.config._cluster import ClusterSettings
from trio_gateway.config._fields import Section
from trio_gateway.config._kubernetes import KubernetesSettings
from trio_gateway.config._sections import (
    MOST_PROCESSES,
    AdminSettings,
    AdmissionSettings,
    BreakerSettings,
    DatabaseSettings,
    DeadlinesSettings,
    DeliverySettings,
    FleetSettings,
    InternalSettings,
    LimitsSettings,
    LogSettings,
    ProbesSettings,
    RetrySettings,
    ServerSettings,
    ShutdownSettings,
    StreamSettings,
    TelemetrySettings,
    WebSocketSettings,
)
from trio_gateway.config._tables import ModelSettings, TenantSettings, WorkerSettings


class Settings(Section):
    """Everything that can be configured; ``Settings()`` is what an empty file means.

    Only `load_settings` and `parse_settings` compare the parts with each other (names that nobody has, limits
    that contradict); whoever builds this by hand has to know what fits together.
    """

    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    internal: InternalSettings = InternalSettings()
    workers: tuple[WorkerSettings, ...] = ()
    models: tuple[ModelSettings, ...] = ()
    tenants: tuple[TenantSettings, ...] = ()
    limits: LimitsSettings = LimitsSettings()
    admission: AdmissionSettings = AdmissionSettings()
    deadlines: DeadlinesSettings = DeadlinesSettings()
    retry: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    probes: ProbesSettings = ProbesSettings()
    fleet: FleetSettings = FleetSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    cluster: ClusterSettings = ClusterSettings()
    delivery: DeliverySettings = DeliverySettings()
    stream: StreamSettings = StreamSettings()
    websocket: WebSocketSettings = WebSocketSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    database: DatabaseSettings = DatabaseSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    def workers_of(self, model: ModelSettings) -> tuple[WorkerSettings, ...]:
        """Answer the workers of the file that may serve a model, in its order.

        Whether each of them has the model, and which further ones register for it, is not known here.
        """
        if model.workers is None:
            return self.workers
        names = set(model.workers)
        return tuple(worker for worker in self.workers if names & {worker.id, *worker.labels})

    def serves_anonymous(self) -> bool:
        """Whether callers without a key are served as long as there is no tenant.

        Where other machines can reach the gateway, they are only if the settings say so.
        """
        return self.server.allow_anonymous or all(bind.local for bind in self.server.bind)

    @property
    def processes(self) -> int:
        """How many processes serve clients."""
        processes = self.server.processes
        return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if processes == "auto" else processes

    def serving_tenants(self) -> tuple[TenantSettings, ...]:
        """Answer the tenants, or, where none is configured, the one that serves everybody without a key.

        That one is alone in the queue and may fill it.
        """
        return self.tenants or (
            TenantSettings(
                id="anonymous",
                keys=(),
                tiers=("interactive", "standard", "batch"),
                max_queued=self.admission.max_queued,
            ),
        )
