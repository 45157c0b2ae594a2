"""Authorities that vouch for gateways and agents under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme


class Authority:
    """One who vouches, and the files of those it vouches for."""

    def __init__(self, folder: Path, name: str) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        self._name = name
        self.ca = str(folder / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, who: str, *names: str, **options: Any) -> dict[str, str]:
        """Make certificate and key of somebody, good for 127.0.0.1 if no name is given."""
        leaf = self._authority.issue_cert(*(names or ("127.0.0.1",)), **options)
        files = {
            kind: self._folder / f"{self._name}-{who}.{ending}"
            for kind, ending in (("certificate", "pem"), ("key", "key"))
        }
        files["certificate"].write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(files["key"]))
        return {kind: str(path) for kind, path in files.items()}
