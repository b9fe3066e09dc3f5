# SPDX-License-Identifier: Apache-2.0
"""Downloads from untrusted URLs: allowed addresses and limits."""

import io
import os
import re
import socket
import threading
import time
from ipaddress import ip_address

import pytest

from tests.helpers.file_server import FileServer, content, for_ever, in_turn, silence, status
from verl.data.media import download as web_download
from verl.data.media.download import download, is_public
from verl.data.media.sizes import DownloadOptions

LOCAL = ("127.0.0.1",)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def fetch(url, hosts=LOCAL, timeout_s=20.0, max_bytes=1 << 20):
    file = io.BytesIO()
    download(url, file, DownloadOptions(hosts, timeout_s, max_bytes))
    return file.getvalue()


def refusal(url, **limits):
    with pytest.raises(ValueError) as caught:
        fetch(url, **limits)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(web_download, "WAITS_S", (0.0, 0.0))


def test_a_file_is_downloaded_unchanged():
    body = os.urandom(300_000)

    with FileServer(a=body, chunks=for_body_in_chunks(body)) as server:
        assert fetch(server.url("a")) == body
        assert fetch(server.url("chunks")) == body


def for_body_in_chunks(body):
    def answer(handler):
        handler.wfile.write(CHUNKED)
        for start in range(0, len(body), 70_000):
            piece = body[start : start + 70_000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    return answer


def test_redirects_are_followed_and_each_target_is_checked():
    with FileServer(a=b"here", near=status(302, Location="/a")) as server:
        for name, target in (
            ("far", server.url("a", host="localhost")),  # a host that is not listed
            ("metadata", "http://169.254.169.254/latest/meta-data/"),
            ("file", "file:///etc/passwd"),
            ("ftp", "ftp://127.0.0.1/a"),
            ("secret", "http://me:word@127.0.0.1/a"),
        ):
            server.answers[name] = status(302, Location=target)

        assert fetch(server.url("near")) == b"here"
        assert refusal(server.url("far")) == "localhost is not one of `data.media_url_hosts` (127.0.0.1)"
        assert "169.254.169.254 is not one of" in refusal(server.url("metadata"))
        assert "file is not http or https" in refusal(server.url("file"))
        assert "ftp is not http or https" in refusal(server.url("ftp"))
        assert "user name or password" in refusal(server.url("secret"))
        assert server.asked["a"] == 1


def test_circular_redirects_end():
    with FileServer(a=status(301, Location="/b"), b=status(307, Location="/a")) as server:
        assert refusal(server.url("a")) == "there are more than 5 redirects"
        assert server.asked.total() == 6


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0", "0.0.0.0"),
        *("localhost", "LOCALHOST", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        *("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "0xa9fea9fe"),
        *("[fe80::1]", "[fc00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "224.0.0.1", "255.255.255.255"),
        *("１２７。0。0。1", "①②⑦.0.0.1"),  # noqa: RUF001 - digits of other kinds, which become plain ones
    ],
)
def test_a_host_without_a_public_address_is_refused_in_every_notation(host):
    with FileServer(a=b"secret") as server:
        reason = refusal(server.url("a", host=host), hosts=())

        assert re.search("which is not a public address|a link-local address", reason), reason
        assert not server.asked


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "file is not http or https"),
        ("ftp://127.0.0.1/a", "ftp is not http or https"),
        ("gopher://127.0.0.1/a", "gopher is not http or https"),
        ("http://me:word@127.0.0.1/a", "user name or password"),
        ("http://example.org@127.0.0.1/a", "user name or password"),
        ("http:///a", "names no host|Invalid URL"),
        ("http://127.0.0.1:99999/a", "Port out of range"),
        ("http://127.0.0.1\\@example.org/", "Invalid URL"),
        ("http://\ud800.org/a", "idna"),
        (f"http://{'a' * 300}.org/a", "idna|not one of"),
    ],
)
def test_other_urls_are_refused(url, reason):
    assert re.search(reason, refusal(url))


def test_only_listed_hosts_are_reachable_and_they_may_be_private():
    with FileServer(a=b"mine") as server:
        assert fetch(server.url("a", host="localhost"), hosts=("localhost",)) == b"mine"
        assert "not one of `data.media_url_hosts`" in refusal("http://8.8.8.8/a", hosts=("localhost",))


@pytest.mark.parametrize("address", ["169.254.169.254", "::ffff:169.254.169.254", "fe80::a9fe:a9fe"])
def test_cloud_metadata_is_refused_for_listed_hosts_too(address, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", answers_in_turn(address))

    reason = refusal("http://mine.test/a", hosts=("mine.test",))

    assert f"resolves to {address}, a link-local address" in reason


def answers_in_turn(*answers):
    """A name server: `answers` are the addresses that it gives one call after the other."""
    left = [answer.split() for answer in answers]

    def getaddrinfo(host, port, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in left.pop(0)]

    return getaddrinfo


def test_a_host_with_one_private_address_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", answers_in_turn("93.184.215.14 10.0.0.7"))

    assert "resolves to 10.0.0.7, which is not a public address" in refusal("http://two.test/a", hosts=())


def test_a_name_is_resolved_once_and_the_connection_uses_that_address(monkeypatch):
    # The name server answers with the server's address first; a second question is an IndexError.
    with FileServer(a=b"here") as server:
        monkeypatch.setattr(socket, "getaddrinfo", answers_in_turn("127.0.0.1"))

        assert fetch(server.url("a", host="moves.test"), hosts=("moves.test",)) == b"here"


def test_a_silent_name_server_does_not_block_past_the_limit(monkeypatch):
    may_answer, answers = threading.Event(), []

    def getaddrinfo(*_, **__):
        may_answer.wait(120)
        answers.append("late")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    reason = refusal("http://slow.test/a", hosts=(), timeout_s=0.3)

    assert "took longer than `data.media_url_timeout_s` (0.3)" in reason
    assert not answers
    may_answer.set()


@pytest.mark.parametrize(("code", "times"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 3)])
def test_a_failed_lookup_is_retried_only_if_that_may_help(code, times, monkeypatch):
    asked = []

    def getaddrinfo(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(code, "not found")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    assert "nowhere.test cannot be looked up: not found" in refusal("http://nowhere.test/a", hosts=())
    assert asked == ["nowhere.test"] * times


@pytest.mark.parametrize(
    "answer",
    [
        silence,
        for_ever(b"x", pause_s=0.05),
        for_ever(b"x", pause_s=0.05, start=b"HTTP/1.1 200 OK\r\nName: "),
        for_ever(b"1\r\nx\r\n", pause_s=0.05, start=CHUNKED),
        for_ever(b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.05, start=b""),
        status(503),
    ],
    ids=["silence", "body", "header", "chunks", "continue", "busy"],
)
def test_a_slow_server_is_abandoned_at_the_time_limit(answer, monkeypatch):
    monkeypatch.setattr(web_download, "WAITS_S", (0.2,) * 100)
    with FileServer(a=answer) as server:
        started = time.monotonic()

        reason = refusal(server.url("a"), timeout_s=0.5)

        assert "took longer than `data.media_url_timeout_s` (0.5)" in reason
        assert time.monotonic() - started >= 0.5


@pytest.mark.parametrize(
    "answer",
    [
        for_ever(b"x" * 10_000),
        for_ever(b"2710\r\n" + b"x" * 10_000 + b"\r\n", start=CHUNKED),
        content(b"short", Content_Length=10**15),
    ],
    ids=["endless", "endless chunks", "promised"],
)
def test_a_file_above_the_size_limit_is_refused(answer):
    with FileServer(a=answer) as server:
        assert refusal(server.url("a"), max_bytes=1 << 20) == "it is larger than `data.media_url_max_mb` (1)"


def test_a_file_of_exactly_the_limit_is_accepted():
    with FileServer(a=b"x" * 1000) as server:
        assert len(fetch(server.url("a"), max_bytes=1000)) == 1000
        assert "larger than" in refusal(server.url("a"), max_bytes=999)


def test_endless_headers_are_refused():
    answer = for_ever(b"Name: value\r\n", start=b"HTTP/1.1 200 OK\r\n")
    with FileServer(a=answer) as server:
        assert "the request to 127.0.0.1 failed" in refusal(server.url("a"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(404), "127.0.0.1 answered 404 Not Found"),
        (status(304), "127.0.0.1 answered 304 Not Modified"),
        (status(302), "127.0.0.1 answered 302 Found"),
        (status(599), "127.0.0.1 answered 599"),
        (content(b"sign in", Content_Type="text/html; charset=utf-8"), "127.0.0.1 sent a web page"),
        (content(b"\x1f\x8b", Content_Encoding="gzip"), "127.0.0.1 used .*'gzip', which was not .*"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n"), "the request to 127.0.0.1 failed: .*"),
    ],
)
def test_a_response_without_the_file_is_not_retried(answer, reason):
    with FileServer(a=answer) as server:
        assert re.fullmatch(reason, refusal(server.url("a")), re.DOTALL)
        assert server.asked["a"] == 1


@pytest.mark.parametrize(
    ("failure", "asked"),
    [
        (status(503), 3),
        (status(429), 3),
        (content(b"cut in the middle", Content_Length=100), 3),
        (lambda handler: None, 6),  # aiohttp asks at once again where a connection ends without an answer
    ],
    ids=["503", "429", "cut", "closed"],
)
def test_temporary_failures_are_retried(failure, asked):
    with FileServer(a=in_turn(failure, failure, content(b"whole")), b=failure) as server:
        assert fetch(server.url("a")) == b"whole"
        assert refusal(server.url("b")).endswith(", 3 times")
        assert server.asked == {"a": 3, "b": asked}


def test_an_unreachable_server_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a"

        assert "the connection to 127.0.0.1 failed" in refusal(url)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    with FileServer(a=b"direct") as server:
        assert fetch(server.url("a")) == b"direct"


def test_a_full_disk_is_not_a_server_failure():
    with FileServer(a=b"x" * 100_000) as server, open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(OSError, match="No space left"):
            download(server.url("a"), full, DownloadOptions(LOCAL))
        assert server.asked["a"] == 1


def test_public_addresses_belong_to_a_single_machine_on_the_internet():
    public = ["8.8.8.8", "93.184.215.14", "2001:4860:4860::8888", "2606:2800:21f::1"]
    other = [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.31.0.1", "192.168.0.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::ffff:8.8.8.8", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2001::1", "2001:db8::1"),
        *("2002:a00:1::", "fc00::1", "fe80::1", "fec0::1", "ff02::1", "ff0e::1"),
    ]

    assert all(is_public(ip_address(address)) for address in public)
    assert not any(is_public(ip_address(address)) for address in other)
