# SPDX-License-Identifier: Apache-2.0
"""The endpoint as the `openai` client sees it: answers, streams, errors, and clients that go away."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import openai
import pytest

from verl.agents.endpoint import server
from verl.agents.endpoint.chat_messages import ApiError, assistant_message
from verl.agents.endpoint.replies import CHUNK, Reply
from verl.agents.endpoint.server import MODEL, Endpoint
from verl.agents.interface import ToolCall

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
QUESTION = [{"role": "user", "content": "How many?"}]


def reply_to(request, text="Three.", calls=(), finish_reason="stop"):
    message = assistant_message(text, calls, [f"call0000{number}" for number in range(len(calls))])
    shown = ["Th", "ree."] if request.has_log_probs else []
    return Reply(message, finish_reason, 7, [5, 6], [-0.5, -0.25], shown)


class Leader:
    """Answers the calls of an endpoint on a thread of its own."""

    def __init__(self, endpoint):
        self.endpoint, self.calls, self.answer = (
            endpoint,
            [],
            lambda call: call.answer(reply_to(call.request)),
        )
        self.is_running = True
        self.thread = threading.Thread(target=self._lead)
        self.thread.start()

    def _lead(self):
        while self.is_running:
            for call in self.endpoint.take(0.02):
                self.calls.append(call)
                self.answer(call)


def no_urls(url):
    raise ValueError(f"{url} was not fetched")


@pytest.fixture(scope="module")
def endpoint():
    with Endpoint(no_urls, shows_tools=True) as endpoint:
        yield endpoint


@pytest.fixture
def leader(endpoint):
    leader = Leader(endpoint)
    yield leader
    leader.is_running = False
    leader.thread.join()


@pytest.fixture
def client(endpoint):
    return openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open("one"), max_retries=0, timeout=20)


def ask(client, **fields):
    return client.chat.completions.create(**({"model": "gpt", "messages": QUESTION} | fields))


def test_the_client_reads_texts_usage_log_probs_and_models(leader, client):
    answer = ask(client, logprobs=True)

    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (
        "Three.",
        "stop",
        None,
    )
    assert [each.token for each in choice.logprobs.content] == ["Th", "ree."]
    assert [each.logprob for each in choice.logprobs.content] == [-0.5, -0.25]
    assert choice.token_ids == [5, 6]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 2, 9)
    assert answer.model == "gpt" and [model.id for model in client.models.list()] == [MODEL]
    assert leader.calls[0].key == "one"


def test_calls_of_tools_come_back_as_json(leader, client):
    calls = [ToolCall("add", {"a": 1, "text": "ä\n"}), ToolCall("add", {})]
    leader.answer = lambda call: call.answer(reply_to(call.request, "", calls, "tool_calls"))

    (choice,) = ask(client, tools=[TOOL]).choices

    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    found = [(each.id, each.type, each.function.name) for each in choice.message.tool_calls]
    assert found == [("call00000", "function", "add"), ("call00001", "function", "add")]
    assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [
        {"a": 1, "text": "ä\n"},
        {},
    ]
    assert leader.calls[0].request.tools == [TOOL]


def test_a_call_with_a_lone_surrogate_is_answered(leader, client):
    calls = [ToolCall("\udc00", {"text": "\ud800"})]
    leader.answer = lambda call: call.answer(reply_to(call.request, "", calls, "tool_calls"))

    for streams in (False, True):
        answer = ask(client, tools=[TOOL], stream=streams)
        parts = [part.choices[0].delta for part in answer] if streams else [answer.choices[0].message]
        (called,) = [call.function for part in parts for call in part.tool_calls or []]
        assert called.name == "\udc00" and json.loads(called.arguments) == {"text": "\ud800"}


def test_a_stream_has_the_same_content_in_several_chunks(leader, client):
    text, calls = "word " * (CHUNK // 2), [ToolCall("add", {"a": 2})]
    leader.answer = lambda call: call.answer(reply_to(call.request, text, calls, "tool_calls"))

    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, tools=[TOOL]))

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    contents = [delta.content for delta in deltas if delta.content]
    assert "".join(contents) == text and len(contents) == 3
    (called,) = [each for delta in deltas for each in delta.tool_calls or []]
    assert (called.index, called.function.name, called.function.arguments) == (0, "add", '{"a": 2}')
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens == 9 and not chunks[-1].choices
    with client.chat.completions.stream(model="gpt", messages=QUESTION, tools=[TOOL]) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.name == "add"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "n"),
        ({"stop": ["."]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"extra_body": {"chat_template_kwargs": {}}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                    *QUESTION,
                ]
            },
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(leader, client, fields, named):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)

    assert refused.value.status_code == 400 and refused.value.param == named
    assert not leader.calls


def test_fields_that_change_nothing_are_taken(leader, client):
    ask(
        client,
        n=1,
        temperature=0.1,
        top_p=0.5,
        seed=3,
        user="me",
        stop=[],
        presence_penalty=0,
        response_format={"type": "text"},
        tool_choice="auto",
        tools=[TOOL],
        parallel_tool_calls=False,
        max_completion_tokens=9,
    )

    request = leader.calls[0].request
    assert (request.max_tokens, request.max_calls, request.parses_calls) == (9, 1, True)


def test_the_errors_of_a_conversation_are_the_clients_own(leader, client):
    full = ApiError("no room", code="context_length_exceeded", param="messages")
    leader.answer = lambda call: call.refuse(full)

    with pytest.raises(openai.BadRequestError) as refused:
        ask(client)

    assert refused.value.code == "context_length_exceeded" and "no room" in str(refused.value)


def test_a_wrong_key_and_one_of_an_ended_conversation_are_refused(endpoint, leader):
    ended = endpoint.open("ended")
    endpoint.close_conversation("ended")
    for api_key in ("sk-guess", ended):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=api_key, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(client)
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert not leader.calls


def test_keys_cannot_be_guessed_and_differ(endpoint):
    keys = {endpoint.open(number) for number in range(50)}
    assert len(keys) == 50 and min(map(len, keys)) >= 32


def post(endpoint, body, headers, path="/v1/chat/completions"):
    host = endpoint.base_url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())["error"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000),
        *(b'{"messages": [{"role": ["user"]}]}', b'{"messages": [{"role": {}, "content": ""}]}'),
        b'{"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(endpoint, leader, body):
    status, error = post(endpoint, body, {"Authorization": f"Bearer {endpoint.open('bad')}"})

    assert status == 400 and error["type"] == "invalid_request_error" and error["message"]


def nested(depth):
    return "[" * depth + "]" * depth


def test_calls_of_64_levels_are_taken_and_deeper_ones_are_refused(endpoint, leader):
    headers = {"Authorization": f"Bearer {endpoint.open('deep')}"}

    def ask_with(arguments):
        call = {"id": "1", "function": {"name": "add", "arguments": arguments}}
        messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, *QUESTION]
        return post(endpoint, json.dumps({"messages": messages}).encode(), headers)

    # an object is a level itself
    with pytest.raises(KeyError, match="error"):
        ask_with(f'{{"a": {nested(63)}}}')
    for depth in (64, 600, 100_000):
        status, error = ask_with(f'{{"a": {nested(depth)}}}')
        assert status == 400 and error["param"] == "messages[1].tool_calls[0]"


def test_a_body_of_many_levels_is_refused(endpoint, leader):
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "metadata": {nested(600)}}}'

    status, error = post(endpoint, body.encode(), {"Authorization": f"Bearer {endpoint.open('deep')}"})

    assert status == 400 and "over 128 levels" in error["message"]


def test_a_huge_body_is_refused_before_it_is_read(endpoint, leader, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 1000)
    headers = {"Authorization": f"Bearer {endpoint.open('huge')}"}

    status, error = post(endpoint, b" " * 2000, headers)
    chunked, _ = post(endpoint, iter([b" " * 600] * 4), headers)

    assert (status, error["code"], chunked) == (413, "request_too_large", 413)


def test_unknown_paths_are_named(endpoint):
    status, error = post(endpoint, b"{}", {}, "/v1/responses")
    assert status == 404 and "POST /v1/responses" in error["message"]


def until(condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def raw_call(endpoint, api_key):
    body = json.dumps({"model": "gpt", "messages": QUESTION}).encode()
    host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def test_a_client_that_disconnects_is_noted(endpoint, leader):
    leader.answer = lambda call: None
    with raw_call(endpoint, endpoint.open("gone")):
        until(lambda: leader.calls)
        assert not leader.calls[0].is_gone
    until(lambda: leader.calls[0].is_gone)
    leader.calls[0].answer(reply_to(leader.calls[0].request))  # too late, and no error


def test_the_end_of_the_server_leaves_no_client_waiting():
    endpoint = Endpoint(None, shows_tools=False)
    leader = Leader(endpoint)
    leader.answer = lambda call: None
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open("x"), max_retries=0, timeout=300)
    raised = []

    def call():
        try:
            ask(client)
        except openai.APIError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: leader.calls)
    leader.is_running = False
    endpoint.close()
    thread.join(60)

    assert not thread.is_alive() and raised


def test_a_text_model_refuses_images_and_a_template_without_tools_refuses_tools():
    with Endpoint(None, shows_tools=False) as endpoint:
        leader = Leader(endpoint)
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.open("x"), max_retries=0)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
        for fields in ({"messages": [{"role": "user", "content": [image]}]}, {"tools": [TOOL]}):
            with pytest.raises(openai.BadRequestError):
                ask(client, **fields)
        leader.is_running = False
        leader.thread.join()


def test_a_call_is_announced_before_it_can_be_taken_and_a_wrong_one_is_not():
    announced, taken = [], []
    with Endpoint(None, shows_tools=False, on_call=announced.append) as endpoint:
        client = openai.OpenAI(
            base_url=endpoint.base_url, api_key=endpoint.open("one"), max_retries=0, timeout=20
        )
        with pytest.raises(openai.BadRequestError):
            ask(client, n=2)
        assert announced == []
        leader = Leader(endpoint)
        leader.answer = lambda call: (taken.append(list(announced)), call.answer(reply_to(call.request)))
        ask(client)
        leader.is_running = False
        leader.thread.join()

    assert taken == [["one"]]
