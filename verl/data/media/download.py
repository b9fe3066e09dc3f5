# SPDX-License-Identifier: Apache-2.0
"""Media named by URL: fetch each file once, then treat it like any other file.

A URL comes from a data row that may be hostile, so a download is limited by time (DNS lookup, redirects and
retries included), by size, and by address: only http and https, every address of the host must be public, and
the connection uses exactly the addresses that were checked. This protects the machine, its network and cloud
metadata services. If the user lists hosts, only these are reachable, and they may be private.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import OK, responses
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from verl.data.media.sizes import DownloadOptions
from verl.utils.background import in_background
from verl.utils.shared_folder import Room

FILE = re.compile(r"[0-9a-f]{38}(\.failed)?")
MAX_REDIRECTS = 5
WAITS_S = (1.0, 2.0, 4.0)  # before retries
REDIRECTS = (301, 302, 303, 307, 308)
TEMPORARY_ERRORS = (408, 425, 429, 500, 502, 503, 504)
IPV6_UNICAST = IPv6Network("2000::/3")  # allocated addresses; IPv4 addresses can hide in the others
HEADERS = {"User-Agent": "verl", "Accept-Encoding": "identity"}


class DownloadFolder:
    """The files that URLs name, kept from run to run in a `shared_folder` under a digest of their URL.

    Args:
        run_id: A failed URL is not requested again by the same run; None is this object and its copies.
        max_bytes: Bound of the folder; None is half of the disk space available to it.
    """

    def __init__(self, options: DownloadOptions, run_id: str | None, max_bytes: int | None = None) -> None:
        self.directory = _private_folder() if options.directory is None else Path(options.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.options = options
        self._run_id = run_id or uuid.uuid4().hex
        self._room = Room(self.directory, FILE, max_bytes)

    def path(self, url: str) -> str:
        """Return the path of the file, fetching it if needed; raises ValueError if that fails."""
        digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        path = self.directory / digest[:2] / digest[2:]
        if not _mark_as_read(path):
            try:
                self._fetch_once(url, path)
            except ValueError as error:
                raise ValueError(f"{url} was not fetched: {error}") from error
            except OSError as error:
                option = f"`data.media_url_dir` ({self.directory})"
                text = f"{option} cannot be written: {error}; free some space, or set another folder"
                raise RuntimeError(text) from error
        return str(path)

    def _fetch_once(self, url: str, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        # The lock makes processes that share the folder fetch the file once; its file records a failure.
        with _locked(path.with_suffix(".failed")) as record:
            if path.exists():  # another process has fetched it
                return
            run_id, _, reason = record.read().partition("\n")
            if run_id == self._run_id:
                raise ValueError(reason)
            try:
                self._fetch(url, path)
                os.unlink(record.name)
            except ValueError as error:
                record.truncate(0)
                record.write(f"{self._run_id}\n{error}")
                raise

    def _fetch(self, url: str, path: Path) -> None:
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as file:
                download(url, file, self.options)
                file.flush()
                os.fsync(file.fileno())  # else the name may survive a system crash without content
            self._room.make(temporary.stat().st_size)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def download(url: str, file: BinaryIO, options: DownloadOptions) -> None:
    """Write the content of a URL to an empty file; raises ValueError if it is refused or fails."""
    asyncio.run(_download(URL(url), file, options))


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address belongs to a single machine on the internet."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    return address.is_global and address in IPV6_UNICAST and address.sixtofour is None


async def _download(url: URL, file: BinaryIO, options: DownloadOptions) -> None:
    deadline = asyncio.timeout(options.timeout_s)
    try:
        async with deadline:
            await _download_with_retries(url, file, options)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise ValueError(f"it took longer than `data.media_url_timeout_s` ({options.timeout_s:g})") from error


async def _download_with_retries(url: URL, file: BinaryIO, options: DownloadOptions) -> None:
    for wait_s in (*WAITS_S, None):
        try:
            await _follow_redirects(url, file, options)
            return
        except ConnectionError as error:
            if wait_s is None:
                raise ValueError(f"{error}, {len(WAITS_S) + 1} times") from error
            file.seek(0)
            file.truncate()
            await asyncio.sleep(wait_s)


async def _follow_redirects(url: URL, file: BinaryIO, options: DownloadOptions) -> None:
    """Fetch a URL; raises ConnectionError where a retry may help."""
    for _ in range(MAX_REDIRECTS + 1):
        addresses = await _allowed_addresses(url, options.hosts)
        try:
            location = await _get(url, addresses, file, options.max_bytes)
        except (aiohttp.ClientSSLError, aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
            raise ValueError(f"the request to {url.host} failed: {error}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"the connection to {url.host} failed: {error}") from error
        if location is None:
            return
        url = url.join(URL(location))
    raise ValueError(f"there are more than {MAX_REDIRECTS} redirects")


async def _get(url: URL, addresses: list[ResolveResult], file: BinaryIO, max_bytes: int) -> str | None:
    """Write the response to the file, or return the location of a redirect."""
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_FixedResolver(addresses)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the caller has a deadline
            # No credentials, cookies or proxies are used.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=HEADERS,
            auto_decompress=False,  # a few bytes can expand to gigabytes before the header is refused
            trust_env=False,  # a proxy would resolve names itself
        ) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        if response.status in REDIRECTS and "Location" in response.headers:
            return response.headers["Location"]
        _check_response(response)
        await _save(response, file, max_bytes)
        return None


def _check_response(response: aiohttp.ClientResponse) -> None:
    status, host = response.status, response.url.host
    if status != OK:
        kind = ConnectionError if status in TEMPORARY_ERRORS else ValueError
        raise kind(f"{host} answered {status} {responses.get(status, '')}".rstrip())
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ValueError(f"{host} used Content-Encoding {encoding!r}, which was not requested")
    if response.content_type == "text/html":
        raise ValueError(f"{host} sent a web page")


async def _save(response: aiohttp.ClientResponse, file: BinaryIO, max_bytes: int) -> None:
    too_large = ValueError(f"it is larger than `data.media_url_max_mb` ({max_bytes / (1 << 20):g})")
    if (response.content_length or 0) > max_bytes:
        raise too_large
    async for chunk in response.content.iter_any():
        if file.tell() + len(chunk) > max_bytes:
            raise too_large
        file.write(chunk)


# --- addresses


class _FixedResolver(AbstractResolver):
    """Resolves to addresses that were checked before, so that DNS cannot change its answer."""

    def __init__(self, addresses: list[ResolveResult]) -> None:
        self._addresses = addresses

    async def resolve(self, *_: Any, **__: Any) -> list[ResolveResult]:
        return self._addresses

    async def close(self) -> None:
        pass


async def _allowed_addresses(url: URL, hosts: tuple[str, ...]) -> list[ResolveResult]:
    if url.scheme not in ("http", "https"):
        raise ValueError(f"{url.scheme or 'no scheme'} is not http or https, in {url}")
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError("URLs with a user name or password are not supported")
    host, port = url.raw_host, url.port
    if not host or port is None:
        raise ValueError("the URL names no host")
    if hosts and host not in hosts:
        raise ValueError(f"{host} is not one of `data.media_url_hosts` ({', '.join(hosts)})")
    addresses = await _resolve(host, port)
    for address in addresses:
        _check_address(host, address["host"], is_listed=bool(hosts))
    return addresses


def _check_address(host: str, text: str, *, is_listed: bool) -> None:
    address = ip_address(text)
    inner = getattr(address, "ipv4_mapped", None) or address
    if inner.is_link_local:  # metadata services of clouds hold secrets of the machine
        raise ValueError(f"{host} resolves to {text}, a link-local address, which is always refused")
    if not is_listed and not is_public(address):
        raise ValueError(
            f"{host} resolves to {text}, which is not a public address;"
            " add the host to `data.media_url_hosts` if it is yours"
        )


async def _resolve(host: str, port: int) -> list[ResolveResult]:
    # A daemon thread: asyncio's own executor would wait for a name server that does not answer.
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        infos = await asyncio.wrap_future(in_background(look_up, f"look up {host}"))
    except socket.gaierror as error:
        kind = ConnectionError if error.errno == socket.EAI_AGAIN else ValueError
        raise kind(f"{host} cannot be looked up: {error.strerror}") from error
    same = {"hostname": host, "port": port, "flags": socket.AI_NUMERICHOST}
    return [
        ResolveResult(**same, host=str(address[0]), family=family, proto=proto)
        for family, _, proto, _, address in infos
    ]


# --- files


def _private_folder() -> Path:
    """Return a folder in the temporary folder that only this user can write."""
    path = Path(tempfile.gettempdir()) / f"verl-media-urls-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()  # a link has all mode bits set
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RuntimeError(
            f"{path} is not private to this user: set `data.media_url_dir` to a folder for media from the web"
        )
    return path


def _mark_as_read(path: Path) -> bool:
    """Renew the access time, but not the modification time, which identifies content; False if missing."""
    with suppress(PermissionError, FileNotFoundError):  # files of other users can be read, not renewed
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path.exists()


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    with path.open("a+", errors="backslashreplace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file
