# SPDX-License-Identifier: Apache-2.0
"""Turn a data row into the chat messages of a prompt and references to its media.

A prompt is a string (one user message) or a list of chat messages. `<image>`, `<video>` and `<audio>` in a
text mark the row's media, in order. A template (`PromptFormat`) may rewrite the text.
"""

import io
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from verl.config.data import DataConfig, RowsConfig
from verl.config.sft import SFTDataConfig
from verl.data.bad_rows import BadRowError
from verl.data.columns import answer_of, media_column
from verl.data.media.audio import wav_bytes
from verl.data.media.references import Reference, inline_bytes, is_url, sound_of
from verl.data.media.sizes import read_item_options
from verl.data.plain_files import Row
from verl.data.prompt_template import PromptFormat
from verl.utils.images import to_rgb

Message = dict[str, Any]
MARKERS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
CHAT_TEXT = re.compile(r"\s*\[\s*\{")
ROLES = ("system", "user", "assistant", "tool", "developer")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def build_messages(
    prompt: Any, row: dict[str, Any], prompt_format: PromptFormat, kinds: Collection[str]
) -> list[Message]:
    """Return the chat messages of a row; content becomes a list of parts where it has media.

    `prompt` is a string, or a list of messages with `role` and `content` (or ShareGPT's `from` and `value`);
    content is a string or a list of parts (`{"type": "text", "text": ...}`, `{"type": "image"}`). Markers of
    other kinds of media than `kinds`, which the model reads, are plain text.
    """
    prompt = chat_of(prompt)
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _check_messages(chat, "the prompt must be a string or a list of chat messages")
    if messages[-1]["role"] == "assistant":
        raise BadRowError("the last message is the assistant's: a prompt must end before the response")
    last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last_user is not None and isinstance(last_user["content"], str):
        last_user["content"] = prompt_format(last_user["content"], row)
    elif prompt_format.path is not None:
        raise BadRowError("`data.format_prompt` needs a user message whose content is a string")
    return [message | {"content": _parts(message["content"], kinds)} for message in messages]


def build_conversation(conversation: Any, kinds: Collection[str]) -> list[Message]:
    """Like `build_messages`, for a list of messages that includes the assistant's turns."""
    messages = _check_messages(chat_of(conversation), "a conversation must be a list of chat messages")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRowError("no message has the role `assistant`: there is nothing to train on")
    if not any(map(is_learned, messages)):
        raise BadRowError("all messages of the assistant have `weight` 0: there is nothing to train on")
    return [message | {"content": _parts(message["content"], kinds)} for message in messages]


def chat_of(prompt: Any) -> Any:
    """Return messages that are given as JSON, as CSV has to give them, and anything else as it is."""
    if not isinstance(prompt, str) or not CHAT_TEXT.match(prompt):
        return prompt
    try:
        messages = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    is_chat = all(isinstance(one, dict) and one.keys() & {"role", "from"} for one in messages)
    return messages if is_chat else prompt


def is_learned(message: Message) -> bool:
    """Return whether a message is a turn to train on; `weight` 0 excludes a turn, as in OpenAI's format."""
    return message["role"] == "assistant" and message.get("weight") != 0


def prompt_of(
    row: Row, config: DataConfig, prompt_format: PromptFormat, kinds: Collection[str]
) -> list[Message]:
    for key, column in (("prompt_key", config.prompt_key), ("answer_key", config.answer_key.split(".")[0])):
        if (name := getattr(config, key)) not in row and column not in row:
            raise BadRowError(f"column `{name}` (`data.{key}`) is missing; the row has {sorted(row)}")
    answer_of(row, config.answer_key)
    return build_messages(row[config.prompt_key], row, prompt_format, kinds)


def conversation_of(
    row: Row, config: SFTDataConfig, prompt_format: PromptFormat, kinds: Collection[str]
) -> list[Message]:
    """Return the conversation of a row, or its formatted prompt followed by the response."""
    if row.get(config.messages_key) is not None:
        return build_conversation(row[config.messages_key], kinds)
    response = row.get(config.response_key)
    if row.get(config.prompt_key) is None or not isinstance(response, str):
        raise BadRowError(
            f"there must be messages in column `{config.messages_key}` (`data.messages_key`), or a prompt"
            f" in `{config.prompt_key}` (`data.prompt_key`) and its response, a text, in"
            f" `{config.response_key}` (`data.response_key`); the row has {sorted(row)}"
        )
    prompt = build_messages(row[config.prompt_key], row, prompt_format, kinds)
    return [*prompt, *build_conversation([{"role": "assistant", "content": response}], kinds)]


def tools_of(row: Row, key: str) -> list[dict[str, Any]]:
    """Return the schemas of the tools of a row's conversation; none without the column."""
    tools = row.get(key)
    is_json = isinstance(tools, str)
    if isinstance(tools, str):
        tools = _json_of(tools, f"column `{key}` (`data.tools_key`)") if tools.strip() else None
    if tools is None:
        return []
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError(
            f"column `{key}` (`data.tools_key`) must hold a list of schemas or its JSON, got {tools!r:.80}"
        )
    return list(tools) if is_json else _without_none(tools)


def media_of(
    row: Row, messages: list[Message], config: RowsConfig, kinds: Collection[str]
) -> dict[str, list[Reference]] | None:
    """Return references to the media of a row, of which the messages have a marker for each; None without.

    Messages without any marker are given them, before the text of the first user message. Audio that the
    model does not read is a column like any other.
    """
    read = partial(references, allow_urls=config.allow_media_urls)
    media = {
        "images": read(row.get(config.image_key), "image", config.image_dir),
        "videos": read(row.get(config.video_key), "video", config.video_dir or config.image_dir),
    }
    if "image" not in kinds:
        if any(media.values()):
            raise BadRowError("the row has images or videos, which the model cannot read")
        media = {}
    if "audio" in kinds:
        media["audios"] = read(row.get(config.audio_key), "audio", config.audio_dir or config.image_dir)
        if config.use_audio_in_video and media.get("videos"):
            if media["audios"]:
                raise BadRowError(
                    "the row has audio besides videos whose sound is heard (`data.use_audio_in_video`), which"
                    " the rollout engine cannot tell apart: leave out one of the two"
                )
            media["sounds"] = [sound_of(video) for video in media["videos"]]
    _put_media_first(messages, media)
    check_counts(messages, media, media_columns(config, kinds), row)
    return media if any(media.values()) else None


def media_columns(config: RowsConfig, kinds: Collection[str]) -> dict[str, str]:
    """Return the columns of `images`, `videos` and, for models that read it, audio."""
    return {
        f"{kind}s": getattr(config, f"{kind}_key") for kind in ("image", "video", "audio") if kind in kinds
    }


def _check_messages(prompt: Any, rule: str) -> list[Message]:
    if not isinstance(prompt, list | tuple) or not prompt:
        raise BadRowError(f"{rule}, or the JSON of such a list, got {prompt!r:.80}")
    messages = []
    for number, message in enumerate(map(_as_message, prompt)):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRowError(f"message {number} must be a dictionary whose `role` is one of {ROLES}")
        if message.get("tool_calls"):
            if isinstance(message["tool_calls"], str):
                name = f"`tool_calls` of message {number}"
                message = message | {"tool_calls": _json_of(message["tool_calls"], name)}
            if not isinstance(message["tool_calls"], list | tuple):
                raise BadRowError(
                    f"`tool_calls` of message {number} must be a list, got {message['tool_calls']!r:.80}"
                )
            calls = [
                _call(call, f"call {place} of message {number}")
                for place, call in enumerate(message["tool_calls"])
            ]
            message = message | {"tool_calls": calls, "content": message.get("content") or ""}
        if not isinstance(message.get("content"), str | list | tuple):
            raise BadRowError(f"message {number} must have a `content`: a string or a list of parts")
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a call as chat templates read it, whose arguments are an object; files often have its JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError(
            f"{name} must be a dictionary with a function's `name` and `arguments`, got {call!r:.80}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json_of(arguments, f"{name}: `arguments`")
    else:
        arguments = _without_none(arguments)
    if not isinstance(arguments, dict):
        raise BadRowError(f"{name}: `arguments` must be an object or its JSON, got {arguments!r:.80}")
    made = {"name": function["name"], "arguments": arguments}
    return {"type": "function", **({"id": call["id"]} if call.get("id") else {}), "function": made}


def _json_of(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadRowError(f"{name} must be JSON ({error}), got {text!r:.80}") from error


def _without_none(value: Any) -> Any:
    """Drop the fields that Arrow adds, because another row of the file has them."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list | tuple) else value


def _as_message(message: Any) -> Any:
    # ShareGPT and LLaVA write `from` and `value` instead of `role` and `content`.
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
        return message
    speaker = str(message["from"])
    return {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": message["value"]}


def _parts(content: str | list[Any], kinds: Collection[str]) -> str | list[dict[str, str]]:
    """Split texts at the markers; a content without media stays (or becomes) one string."""
    if not kinds and isinstance(content, str):
        return content
    marker = re.compile(f"({'|'.join(mark for mark, kind in MARKERS.items() if kind in kinds)})")
    parts: list[dict[str, str]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind == "text" and isinstance(part.get("text"), str):
            pieces = filter(None, marker.split(part["text"])) if kinds else [part["text"]]
            parts += [{"type": MARKERS[p]} if p in MARKERS else {"type": "text", "text": p} for p in pieces]
        elif kind in MARKERS.values() and not any(part.get(key) for key in (kind, "url", "path")):
            parts.append({"type": kind})
        else:
            raise BadRowError(
                "a part of a message must be a text, or a medium without payload (media go into"
                f" their columns), got {part!r:.80}"
            )
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _put_media_first(messages: list[Message], media: Mapping[str, Sequence[Any]]) -> None:
    user = next((message for message in messages if message["role"] == "user"), None)
    parts = [{"type": kind} for kind in MARKERS.values() for _ in media.get(f"{kind}s", ())]
    if parts and user is not None and all(isinstance(message["content"], str) for message in messages):
        user["content"] = [*parts, {"type": "text", "text": user["content"]}]


def check_counts(
    messages: list[Message], media: Mapping[str, Sequence[Any]], columns: Mapping[str, str], row: Row
) -> None:
    """Raise a BadRowError unless the numbers of markers and media (`images`, `videos`, ...) are equal."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    kinds = [part["type"] for content in contents for part in content]
    for marker, kind in MARKERS.items():
        noun = f"{kind}s"
        found, given, column = kinds.count(kind), len(media.get(noun, ())), columns.get(noun)
        if noun not in media or found == given:
            continue
        text = f"the prompt has {found} {marker} but the row has {given} {noun} in column `{column}`"
        text += f" (`data.{kind}_key`)"
        remedy = f"write {marker} where each belongs, in the rows or with a template (`data.format_prompt`)"
        if given == 0:
            text += ", which is missing" if column not in row else ""
            other = media_column(noun, row, columns.values())
            remedy = f"give the row its {noun} there, or leave {marker} out"
            if other is not None:
                remedy = f"its column `{other}` looks like {noun}: set `data.{kind}_key={other}`"
        raise BadRowError(f"{text}: {remedy}")


def references(value: Any, kind: str, folder: str | None, *, allow_urls: bool = False) -> list[Reference]:
    """Read a media column (a single value, a list, or None) as paths, URLs and bytes, some with options.

    Relative paths start in `folder`; None is the working directory.
    """
    references: list[Reference] = []
    for item in _as_list(value):
        options = read_item_options(item, kind) if isinstance(item, dict) else {}
        source = _reference(item, kind, folder, allow_urls)
        key = "path" if isinstance(source, str) else "bytes"
        references.append({key: source} | options if options else source)
    return references


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | dict | Image.Image):
        return [value] if value else []
    return list(value) if isinstance(value, Iterable) else [value]


def _reference(item: Any, kind: str, folder: str | None, allow_urls: bool) -> str | bytes:
    """Return a path, a URL or bytes; an image in memory becomes a PNG."""
    if isinstance(item, dict) and kind == "audio" and item.get("array") is not None:  # of `datasets`
        return wav_bytes(np.asarray(item["array"], dtype=np.float32), int(item["sampling_rate"]))
    may_be_path = not (isinstance(item, dict) and item.get("bytes"))
    if isinstance(item, dict):
        item = item.get("bytes") or item.get("path") or item.get(kind)
    if isinstance(item, str):
        try:
            content = inline_bytes(item, may_be_path=may_be_path)
        except ValueError as error:
            raise BadRowError(f"the {kind} of a row cannot be read: {error}") from error
        if content is not None:
            return content
    if isinstance(item, str) and is_url(item):
        if not allow_urls:
            raise BadRowError(
                f"{item} is on the web: set `data.allow_media_urls=true` to fetch {kind}s, or give paths"
            )
        return item
    if isinstance(item, str) and item:
        path = Path(os.path.expanduser(item.removeprefix("file://")))
        return str((Path(folder) / path if folder else path).absolute())
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    if isinstance(item, Image.Image) and kind == "image":
        buffer = io.BytesIO()
        to_rgb(item).save(buffer, format="PNG")
        return buffer.getvalue()
    raise BadRowError(
        f"{kind}s must be paths, bytes, or dictionaries with `bytes` or `path`, got {item!r:.80}"
    )
