# SPDX-License-Identifier: Apache-2.0
"""The judge against a real local HTTP server that fails in every way an endpoint can."""

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.helpers.chat_server import ChatServer, Reply
from tests.rewards.test_manager import wait_until
from verl.rewards.graders.llm_judge import Judge

HELLO = [{"role": "user", "content": "Is 7 prime?"}]


def ask(judge, messages=HELLO):
    return asyncio.run(judge.ask(messages))


def ask_all(judge, conversations):
    async def gather():
        return await asyncio.gather(*(judge.ask(messages) for messages in conversations))

    return asyncio.run(gather())


def key(judge, messages):
    """The name of an answer in the cache, whose answers here are their names."""
    judge._cache = SimpleNamespace(get=lambda name: name)
    return ask(judge, messages)


def say(text):
    return [{"role": "user", "content": text}]


def test_the_request_holds_model_messages_and_parameters_and_the_answer_is_its_text():
    with ChatServer(Reply("Yes.\n")) as server:
        judge = Judge(f"{server.url}/", "m", temperature=None, max_tokens=9, options={"seed": 1, "top_k": 5})

        assert ask(judge) == "Yes.\n"
        assert server.requests == [{"model": "m", "messages": HELLO, "max_tokens": 9, "seed": 1, "top_k": 5}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"choices": 5}', "something other than a chat completion: .*check `base_url`"),
        ('{"choices": [5]}', "something other than a chat completion"),
        ('{"choices": [{"message": null}]}', "something other than a chat completion"),
        ('{"choices": {}}', "something other than a chat completion"),
        ('{"choices": [{"message": {"content": []}}]}', "answered without text"),
        ('{"choices": [{"message": {"content": {"text": "Yes"}}}]}', "answered without text"),
    ],
)
def test_an_answer_of_another_form_is_an_error_that_names_the_judge(body, message):
    with ChatServer(Reply(body=body)) as server, pytest.raises(RuntimeError, match=f"'m'.*{message}"):
        ask(Judge(server.url, "m", max_retries=0))


def test_a_judge_is_greedy_and_brief_by_default():
    with ChatServer() as server:
        ask(Judge(server.url, "m"))

        assert server.requests == [{"model": "m", "messages": HELLO, "temperature": 0.0, "max_tokens": 512}]


def test_the_key_comes_from_the_environment_and_nothing_is_sent_without_one(monkeypatch):
    monkeypatch.setenv("MY_KEY", " secret\n")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    with ChatServer() as server:
        ask(Judge(server.url, "m", api_key_env="MY_KEY"))
        ask(Judge(server.url, "m"))

        assert [headers["Authorization"] for headers in server.headers] == ["Bearer secret", "Bearer none"]


def test_a_key_that_is_not_in_the_environment_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)

    with pytest.raises(ValueError, match="`api_key_env`: the environment variable MY_KEY must hold the key"):
        Judge("http://localhost/v1", "m", api_key_env="MY_KEY")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000/v1"}, "`base_url` must be like http://host:8000/v1, got 'localhost"),
        ({"base_url": "http:///v1"}, "`base_url` must be like"),
        ({"max_concurrency": 0}, "`max_concurrency` must be at least 1, got 0"),
        ({"max_retries": -1}, "`max_retries` must be at least 0, got -1"),
        ({"max_cache_bytes": 0}, "`max_cache_bytes` must be at least 1"),
        ({"timeout_s": 0.0}, "`timeout_s` must be above 0 seconds"),
        ({"timeout_s": float("nan")}, "`timeout_s` must be above 0 seconds"),
    ],
)
def test_an_argument_out_of_range_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        Judge(**{"base_url": "http://localhost/v1", "model": "m"} | options)


def test_passing_failures_are_retried_after_growing_pauses():
    with ChatServer(Reply("busy", 429), Reply("ill", 503), Reply("Yes")) as server:
        assert ask(Judge(server.url, "m")) == "Yes"

        first, second, third = server.times
        assert second - first >= 0.37  # 0.5 s less up to a quarter
        assert third - second >= 0.74  # twice that


@pytest.mark.parametrize("status", [408, 409, 500, 502])
def test_every_status_that_may_pass_is_retried(status):
    with ChatServer(Reply("busy", status), Reply("Yes")) as server:
        assert ask(Judge(server.url, "m")) == "Yes"


def test_the_servers_own_pause_is_kept():
    with ChatServer(Reply("busy", 429, headers=(("Retry-After", "1"),)), Reply("Yes")) as server:
        assert ask(Judge(server.url, "m")) == "Yes"
        assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize(
    ("status", "error", "parts"),
    [
        (401, ValueError, ["name the environment variable that holds the key in `api_key_env`"]),
        (404, ValueError, ["`base_url` usually ends in /v1", "must be listed at", "/v1/models"]),
        (400, ValueError, ["change the messages or the parameters"]),
        (429, RuntimeError, ["in up to 1 attempts", "raise `max_retries`"]),
        (502, RuntimeError, ["in up to 1 attempts", "see the server's log"]),
    ],
)
def test_a_failure_names_url_model_status_what_the_server_said_and_the_remedy(status, error, parts):
    with ChatServer(Reply("the reason", status)) as server:
        judge = Judge(server.url, "m", max_retries=0)

        with pytest.raises(error) as raised:
            ask(judge)

        expected = [f"judge 'm' at {server.url}", f"answered status {status}", "the reason", *parts]
        assert [part for part in expected if part not in str(raised.value)] == []
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_for_good_is_not_retried(status):
    with ChatServer(Reply("no", status), Reply("Yes")) as server:
        with pytest.raises(ValueError, match=f"answered status {status}: "):
            ask(Judge(server.url, "m"))

        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "400: too long: change"),
        ('{"detail": "Not Found"}', "400: {'detail': 'Not Found'}: change"),
        ("<h1>no</h1>", "400: <h1>no</h1>: change"),
        ("", "400: Bad Request: change"),
        ("x" * 9000, "x ...: change"),
    ],
)
def test_what_the_server_said_is_shown_in_whatever_form(body, shown):
    with ChatServer(Reply(status=400, body=body)) as server:
        with pytest.raises(ValueError, match="answered status") as raised:
            ask(Judge(server.url, "m"))

        assert shown in str(raised.value)
        assert len(str(raised.value)) < 800


def test_a_wrong_key_is_named_by_its_variable_and_never_shown(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with (
        ChatServer(Reply("no", 401)) as server,
        pytest.raises(ValueError, match="put a valid key into the environment variable MY_KEY") as raised,
    ):
        ask(Judge(server.url, "m", api_key_env="MY_KEY"))

    assert "secret" not in str(raised.value)


def test_a_server_that_answers_too_late_is_a_timeout_after_its_retries():
    with ChatServer(Reply(delay_s=60.0)) as server:
        judge = Judge(server.url, "m", timeout_s=1.0, max_retries=1)

        with pytest.raises(TimeoutError, match=r"within `timeout_s` \(1 s\) in up to 2 attempts: raise it"):
            ask(judge)

        wait_until(lambda: len(server.requests) == 2)  # the server may read the last one late


def test_a_late_answer_is_asked_for_again():
    with ChatServer(Reply(delay_s=60.0), Reply("Yes")) as server:
        assert ask(Judge(server.url, "m", timeout_s=1.0)) == "Yes"


def test_a_server_that_is_not_there_is_an_error_that_says_so():
    with ChatServer() as server:
        url = server.url

    with pytest.raises(
        ConnectionError, match=f"'m' at {url} cannot be reached in up to 2 attempts .*: start"
    ):
        ask(Judge(url, "m", max_retries=1))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(body="<html>a web page</html>", content_type="text/html"),
        Reply(body='{"object": "list", "data": []}'),
        Reply(body='"text"'),
        Reply(body='{"choices": []}'),
        Reply(body='{"choices": [{"ind'),
    ],
)
def test_an_address_that_is_no_endpoint_is_an_error_that_names_it(reply):
    with ChatServer(reply) as server:
        with pytest.raises(RuntimeError, match=f"judge 'm' at {server.url} answered "):
            ask(Judge(server.url, "m"))

        assert len(server.requests) == 1


@pytest.mark.parametrize("text", [None, ""])
def test_an_answer_without_text_is_an_error_and_is_not_kept(tmp_path, text):
    with ChatServer(Reply(text), Reply("Yes")) as server:
        judge = Judge(server.url, "m", cache_dir=tmp_path)

        with pytest.raises(RuntimeError, match=r"without text \(finish_reason 'length'\): .* `max_tokens`"):
            ask(judge)

        assert ask(judge) == "Yes"


def test_no_more_requests_run_concurrently_than_allowed():
    three = threading.Barrier(3)

    def reply(_):
        three.wait(60)  # for ever, if fewer may run
        return Reply(delay_s=0.05)

    with ChatServer(reply) as server:
        judge = Judge(server.url, "m", max_concurrency=3)

        answers = ask_all(judge, [say(str(number)) for number in range(12)])

        assert answers == ["Score: 7"] * 12
        assert server.most_running == 3


def test_a_judge_works_in_one_event_loop_after_the_other(recwarn):
    with ChatServer() as server:
        judge = Judge(server.url, "m", max_concurrency=2)
        for _ in range(3):
            assert ask_all(judge, [say(str(number)) for number in range(8)]) == ["Score: 7"] * 8

        assert len(judge._sessions) == 1  # those of the loops that ended are gone
        assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_a_question_is_asked_once_for_all_processes_that_name_the_directory(tmp_path):
    code = (
        "import asyncio, sys\nfrom verl.rewards.graders.llm_judge import Judge\n"
        "judge = Judge(sys.argv[1], 'm', cache_dir=sys.argv[2])\n"
        "assert asyncio.run(judge.ask([{'role': 'user', 'content': 'Is 7 prime?'}])) == 'Yes'\n"
        "assert not {'torch', 'numpy', 'ray'} & set(sys.modules), 'a reward process starts fast'\n"
    )
    with ChatServer(Reply("Yes"), Reply("asked twice")) as server:
        assert ask(Judge(server.url, "m", cache_dir=tmp_path)) == "Yes"
        url = server.url
    ended = subprocess.run([sys.executable, "-c", code, url, tmp_path], capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr  # although the server is gone
    assert len(server.requests) == 1


def test_equal_questions_at_the_same_time_are_asked_once(tmp_path):
    with ChatServer(Reply("Yes", delay_s=0.1)) as server:
        judge = Judge(server.url, "m", cache_dir=tmp_path)

        assert ask_all(judge, [HELLO] * 8 + [say("Is 8?")]) == ["Yes"] * 9
        assert len(server.requests) == 2


def test_whoever_waits_for_an_equal_question_asks_itself_if_the_first_one_is_cancelled(tmp_path):
    async def cancel_the_first(judge):
        first = asyncio.create_task(judge.ask(HELLO))
        while not server.requests:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(judge.ask(HELLO))
        await asyncio.sleep(0.05)
        first.cancel()
        return await asyncio.gather(first, second, return_exceptions=True)

    with ChatServer(Reply("late", delay_s=60.0), Reply("Yes")) as server:
        first, second = asyncio.run(cancel_the_first(Judge(server.url, "m", cache_dir=tmp_path)))

        assert isinstance(first, asyncio.CancelledError)
        assert second == "Yes"


@pytest.mark.parametrize(
    "other",
    [
        {"base_url": "http://other/v1"},
        {"model": "n"},
        {"temperature": 0.5},
        {"temperature": None},
        {"max_tokens": 8},
        {"options": {"seed": 1}},
    ],
)
def test_everything_that_decides_an_answer_is_in_its_key(other):
    default = {"base_url": "http://host/v1", "model": "m"}

    assert key(Judge(**default), HELLO) != key(Judge(**default | other), HELLO)


def test_the_conversation_is_in_the_key_and_nothing_else_is(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    judge = Judge("http://host/v1", "m", options={"a": 1, "b": 2})
    same = Judge(
        "http://host/v1/", "m", api_key_env="MY_KEY", max_retries=1, timeout_s=1, max_concurrency=1,
        options={"b": 2, "a": 1},
    )  # fmt: skip
    system = [{"role": "system", "content": "Is 7 prime?"}]

    assert key(judge, HELLO) == key(same, [dict(reversed(HELLO[0].items()))])
    assert len({key(judge, one) for one in (HELLO, HELLO * 2, system, say("Is 7 prime? "))}) == 4


def test_without_a_directory_every_question_is_asked():
    with ChatServer(Reply("first"), Reply("second")) as server:
        judge = Judge(server.url, "m", temperature=1.0)

        assert [ask(judge), ask(judge)] == ["first", "second"]


def test_a_missing_package_is_an_error_that_says_how_to_install_it():
    code = "import sys; sys.modules['openai'] = None; import verl.rewards.graders.llm_judge"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "a judge needs the package openai: pip install 'easy-verl[judge]'" in ended.stderr
