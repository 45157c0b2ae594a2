"""Settings: one TOML file, strict and helpful.

`load_settings` answers frozen `Settings`, or raises `ConfigurationError` with every `Problem` at once, each
with file, line and key. The gateway hands each part its own section; nobody below knows this room.

How a file becomes settings, in order: `_document` (TOML, overrides, where each value came from), `_validate`
(each value alone), `_checks` (values against each other), `_load` (files that the file names).
"""

from trio_gateway.config._addresses import Bind, Endpoint, parse_bind, parse_network, parse_origin, parse_url
from trio_gateway.config._certificates import certificate_complaint
from trio_gateway.config._cluster import ClusterSettings, StoreUrl, parse_store_url
from trio_gateway.config._database import DatabaseUrl, parse_database_url
from trio_gateway.config._explain import explain
from trio_gateway.config._fields import Section
from trio_gateway.config._key_table import judge_tenant, key_table, parse_expiry
from trio_gateway.config._kubernetes import ACCOUNT as SERVICE_ACCOUNT
from trio_gateway.config._kubernetes import KubernetesSettings
from trio_gateway.config._load import load_settings, names_database, parse_settings
from trio_gateway.config._problems import ConfigurationError, Problem, quoted_key
from trio_gateway.config._reference import reference_page
from trio_gateway.config._sections import (
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
    TlsSettings,
)
from trio_gateway.config._settings import Settings
from trio_gateway.config._source import LIVE, Source
from trio_gateway.config._stored import Merged, TenantMerger
from trio_gateway.config._tables import (
    CANCEL_GRACE,
    DEFAULT_SLOTS,
    KeySettings,
    ModelSettings,
    TenantSettings,
    WorkerSettings,
)

__all__ = [
    "CANCEL_GRACE",
    "DEFAULT_SLOTS",
    "LIVE",
    "SERVICE_ACCOUNT",
    "AdminSettings",
    "AdmissionSettings",
    "Bind",
    "BreakerSettings",
    "ClusterSettings",
    "ConfigurationError",
    "DatabaseSettings",
    "DatabaseUrl",
    "DeadlinesSettings",
    "DeliverySettings",
    "Endpoint",
    "FleetSettings",
    "InternalSettings",
    "KeySettings",
    "KubernetesSettings",
    "LimitsSettings",
    "LogSettings",
    "Merged",
    "ModelSettings",
    "ProbesSettings",
    "Problem",
    "RetrySettings",
    "Section",
    "ServerSettings",
    "Settings",
    "ShutdownSettings",
    "Source",
    "StoreUrl",
    "StreamSettings",
    "TenantMerger",
    "TenantSettings",
    "TlsSettings",
    "WorkerSettings",
    "certificate_complaint",
    "explain",
    "judge_tenant",
    "key_table",
    "load_settings",
    "names_database",
    "parse_bind",
    "parse_database_url",
    "parse_expiry",
    "parse_network",
    "parse_origin",
    "parse_settings",
    "parse_store_url",
    "parse_url",
    "quoted_key",
    "reference_page",
]
