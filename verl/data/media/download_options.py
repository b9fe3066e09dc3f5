# SPDX-License-Identifier: Apache-2.0
"""Options of downloads, apart from the downloads, which import an HTTP client."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DownloadOptions:
    """Limits of downloads and where files are kept; equal in every process of a run."""

    hosts: tuple[str, ...] = ()  # the only reachable hosts; () is every public host
    timeout_s: float = 60.0  # for each file
    max_bytes: int = 1 << 30
    directory: str | None = None  # None is a folder of this user in each node's temporary folder

    @classmethod
    def from_data(cls, data: Any) -> "DownloadOptions":
        """Take them from the `data` section of a config."""
        hosts = tuple(host.lower() for host in data.media_url_hosts)
        return cls(hosts, data.media_url_timeout_s, data.media_url_max_mb << 20, data.media_url_dir)
