"""How the gateway reads from Kubernetes which pods there are, and by which words pods are chosen."""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

from trio_gateway.config._fields import Section, about

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where every pod finds what its service account is given."""

_NAME: Final = r"(?:[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE: Final = r"(?:[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_REQUIREMENT: Final = re.compile(
    rf"\s*(?:!?\s*{_NAME}|{_NAME}\s*(?:==|=|!=)\s*{_VALUE}"
    rf"|{_NAME}\s+(?:in|notin)\s+\(\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*\))\s*"
)
_COMMA: Final = re.compile(r",(?![^()]*\))")


def check_selector(text: str) -> str:
    """Judge a label selector, and answer it as it is.

    Raises:
        ValueError: Kubernetes would not take it, or it chooses every pod.
    """
    if not text.strip():
        raise ValueError("chooses every pod of the namespace: name a label")
    if not all(_REQUIREMENT.fullmatch(part) for part in _COMMA.split(text)):
        raise ValueError('must be a label selector such as "app=vllm" or "app=vllm,tier in (gold, silver)"')
    return text


def _check_api(url: str) -> str:
    parts = urlsplit(url)
    try:
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError('must be a URL such as "https://kubernetes.default.svc"')
    if parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
        raise ValueError("must end after the host or port, without user info")
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError("must be https: the token would go over the network in clear text")
    return url.rstrip("/")


def _check_label(text: str) -> str:
    if not re.fullmatch(_NAME, text):
        raise ValueError('must be the name of an annotation or label, such as "trio-gateway/slots"')
    return text


def _check_namespace(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError("must be the name of a namespace: lower-case letters, digits and hyphens")
    return text


class KubernetesSettings(Section):
    """Where the API of Kubernetes is, for workers with `pods`; a gateway in a pod needs none of it."""

    api: Annotated[
        str,
        AfterValidator(_check_api),
        about("URL", "Base URL of the API; http only on this machine, for `kubectl proxy`."),
    ] = "https://kubernetes.default.svc"
    namespace: Annotated[
        str | None,
        AfterValidator(_check_namespace),
        about("name", "Namespace of the pods; without it, that of the gateway's own pod."),
    ] = None
    token_file: Annotated[
        str,
        about(
            "path",
            "File with the service account's token, read for each call, since Kubernetes replaces it; not "
            "used with http.",
        ),
    ] = f"{ACCOUNT}/token"
    ca: Annotated[
        str,
        about("path", "PEM file with the authorities that vouch for the API; read again every few minutes."),
    ] = f"{ACCOUNT}/ca.crt"
    slots_key: Annotated[
        str,
        AfterValidator(_check_label),
        about(
            "name",
            "Annotation of a pod, or else label, with the requests that it serves at a time; without it the "
            "worker's `slots` count.",
        ),
    ] = "trio-gateway/slots"
