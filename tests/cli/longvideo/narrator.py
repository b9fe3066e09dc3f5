# SPDX-License-Identifier: Apache-2.0
"""A chat server that captions clips, writes questions and rewrites reasons, by what a request asks for."""

import re

from tests.helpers.chat_server import ChatServer, Reply

QUESTION = """QUESTION: What happens {category}?
A. It moves left.
B. It moves right.
C. It stands.
D. It is gone.
ANSWER: B
REASONS:
##### From [0:00:00 - 0:00:02]:
- The pattern moves to the right at the start.
##### From [0:00:02 - 0:00:04]:
- It still does, so A, C and D are wrong.
"""
PROSE = "Let me look at the beginning. It moves to the right, so it is B."


class Narrator(ChatServer):
    """Answers each kind of request; `fail` maps a part of a request's text to the reply that it gets."""

    def __init__(self, fail=None):
        super().__init__()
        self.fail = dict(fail or {})
        self.kinds = []

    def reply_to(self, path, body, headers):
        super().reply_to(path, body, headers)
        text = text_of(body)
        with self.lock:
            for part, reply in self.fail.items():
                if part in text:
                    return reply
            kind, answer = answer_to(text)
            self.kinds.append(kind)
        return Reply(answer)


def answer_to(text):
    if "frames of a clip" in text:
        start = re.search(r"clip from ([\d:]+)", text)[1]
        return "caption", f"A pattern moves.\nIt is {start}."
    if "exam questions" in text:
        return "reason", "<think>so</think>\n" + QUESTION.format(
            category=re.search(r'category "(.+?)"', text)[1]
        )
    return "reformat", PROSE


def text_of(body):
    (message,) = body["messages"]
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def images_of(body):
    return [
        part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"
    ]
