# SPDX-License-Identifier: Apache-2.0
"""A file fetched from the web, where neither the address nor the server is to be trusted.

A URL comes from a row of data that nobody has read, so what it may do is bounded:

- time: one limit for everything, from looking up the name to the last byte, redirects and repetitions
  included;
- bytes: by what the server promises, and by what it sends;
- addresses: http and https only. Every address that a name stands for must be public, which keeps this
  machine, the network around it and the metadata services of clouds out of reach, and the connection goes to
  the addresses that were looked at: the name is not looked up again. Each redirect is a new URL to all this;
- credentials: none are sent, no cookies, and the proxies of the environment are not used, since a proxy
  would look up names by itself.

Hosts that the user lists are reached wherever they are, and then no others.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import OK, responses
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import BinaryIO

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

MAX_REDIRECTS = 5
WAITS_S = (1.0, 2.0, 4.0)  # before a server that failed is asked again
REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)  # statuses that may be others in a moment
IPV6_UNICAST = IPv6Network("2000::/3")  # what is given out; around it IPv4 addresses hide in IPv6 ones
HEADERS = {"User-Agent": "verl", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class DownloadLimits:
    """What a download may do.

    Attributes:
        hosts: Names of the only hosts that may be asked, which may be private; empty is every public host.
        timeout_s: Seconds that a file may take.
        max_bytes: Bytes that a file may have.
    """

    hosts: tuple[str, ...] = ()
    timeout_s: float = 60.0
    max_bytes: int = 1 << 30


def download(url: str, file: BinaryIO, limits: DownloadLimits) -> None:
    """Write what a URL names to an empty file. What stands in it after an error means nothing.

    Raises:
        ValueError: The URL is refused, its server fails, or a limit is reached; the message says which.
        OSError: The file cannot be written.
    """
    asyncio.run(_download(url, file, limits))


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address belongs to one machine anywhere on the internet."""
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    return address.is_global and address in IPV6_UNICAST and address.sixtofour is None


async def _download(url: str, file: BinaryIO, limits: DownloadLimits) -> None:
    deadline = asyncio.timeout(limits.timeout_s)
    try:
        async with deadline:
            await _try_again(URL(url), file, limits)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise ValueError(f"it took longer than `data.media_url_timeout_s` ({limits.timeout_s:g})") from error


async def _try_again(url: URL, file: BinaryIO, limits: DownloadLimits) -> None:
    for wait_s in WAITS_S:
        try:
            return await _follow(url, file, limits)
        except ConnectionError:
            file.seek(0)
            file.truncate()
            await asyncio.sleep(wait_s)
    try:
        return await _follow(url, file, limits)
    except ConnectionError as error:
        raise ValueError(f"{error}, {len(WAITS_S) + 1} times") from error


async def _follow(url: URL, file: BinaryIO, limits: DownloadLimits) -> None:
    """Fetch a URL once, through its redirects; a ConnectionError is what may not happen again."""
    for _ in range(MAX_REDIRECTS + 1):
        addresses = await _allowed_addresses(url, limits.hosts)
        try:
            location = await _get(url, addresses, file, limits)
        except (aiohttp.ClientSSLError, aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:
            raise ValueError(f"{url.host} cannot be talked to: {error}") from error
        except aiohttp.ClientError as error:
            raise ConnectionError(f"the connection to {url.host} failed: {error}") from error
        if location is None:
            return
        url = url.join(URL(location))
    raise ValueError(f"it is redirected more than {MAX_REDIRECTS} times")


async def _get(
    url: URL, addresses: Sequence[ResolveResult], file: BinaryIO, limits: DownloadLimits
) -> str | None:
    """Write the answer to the file, or return where it redirects to."""
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_Known(addresses)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the caller's is the one
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=HEADERS,
            auto_decompress=False,  # a few bytes can unfold to gigabytes before the header is refused
            trust_env=False,
        ) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        if response.status in REDIRECTS and "Location" in response.headers:
            return response.headers["Location"]
        _check_answer(response)
        await _save(response, file, limits.max_bytes)
        return None


def _check_answer(response: aiohttp.ClientResponse) -> None:
    status, host = response.status, response.url.host
    if status != OK:
        kind = ConnectionError if status in PASSING else ValueError
        raise kind(f"{host} answered {status} {responses.get(status, '')}".rstrip())
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ValueError(f"{host} sent it with Content-Encoding {encoding!r}, which was not asked for")
    if response.content_type == "text/html":
        raise ValueError(f"{host} sent a web page")


async def _save(response: aiohttp.ClientResponse, file: BinaryIO, max_bytes: int) -> None:
    size = response.content_length or 0
    if size <= max_bytes:
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > max_bytes:
                break
            file.write(chunk)
    if size > max_bytes:
        raise ValueError(f"it is larger than `data.media_url_max_mb` ({max_bytes / (1 << 20):g})")


# --- addresses


class _Known(AbstractResolver):
    """Answers with addresses that were looked up and allowed before."""

    def __init__(self, addresses: Sequence[ResolveResult]) -> None:
        self._addresses = list(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return self._addresses

    async def close(self) -> None:
        """Nothing is held."""


async def _allowed_addresses(url: URL, hosts: tuple[str, ...]) -> list[ResolveResult]:
    """The addresses of a URL's host, all of which may be connected to."""
    if url.scheme not in ("http", "https"):
        raise ValueError(f"{url.scheme or 'no scheme'} is not http or https, in {url}")
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError("a URL with a user name or password is not used")
    host, port = url.raw_host, url.port
    if not host or port is None:
        raise ValueError("the URL names no host")
    if hosts and host not in hosts:
        raise ValueError(f"{host} is not one of `data.media_url_hosts` ({', '.join(hosts)})")
    found = await _look_up(host, port)
    for entry in found:
        _check_address(host, entry["host"], is_listed=bool(hosts))
    return found


def _check_address(host: str, text: str, *, is_listed: bool) -> None:
    address = ip_address(text)
    inner = getattr(address, "ipv4_mapped", None) or address
    if inner.is_link_local:  # where clouds keep the secrets of a machine
        raise ValueError(f"{host} stands for {text}, a link-local address, which is never asked")
    if not is_listed and not is_public(address):
        raise ValueError(
            f"{host} stands for {text}, which is not a public address;"
            " name the host in `data.media_url_hosts` if it is yours"
        )


async def _look_up(host: str, port: int) -> list[ResolveResult]:
    """All addresses of a host; the thread of a name server that does not answer is left behind."""
    answer: Future[list[ResolveResult]] = Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.set_result(
                [
                    ResolveResult(
                        hostname=host, host=str(address[0]), port=port, family=family, proto=proto,
                        flags=socket.AI_NUMERICHOST,
                    )
                    for family, _, proto, _, address in infos
                ]
            )  # fmt: skip
        except (OSError, ValueError) as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return await asyncio.wrap_future(answer)
    except socket.gaierror as error:
        kind = ConnectionError if error.errno == socket.EAI_AGAIN else ValueError
        raise kind(f"{host} cannot be looked up: {error.strerror}") from error
