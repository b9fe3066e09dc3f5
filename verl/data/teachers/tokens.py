# SPDX-License-Identifier: Apache-2.0
"""Check that a teacher reads the policy's tokens: distributions are compared token by token."""

from collections.abc import Iterator
from typing import Any

from verl.config.distillation import TEACHERS, DistillationConfig
from verl.data.tokenizer import load_tokenizer

MAX_SHOWN = 3
TEXTS = (  # whose tokens show the rules by which tokenizers divide texts
    "What is 12,345 + 6.78? Let me think step by step.\n\n",
    "def f(x):\n    return {'a': x ** 2}  # \u00e9t\u00e9",
    "\u4f60\u597d\uff0c\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f642",
    "  \\frac{1}{2} \\boxed{42}",
)


def check_teacher_tokens(distillation: DistillationConfig, policy_tokenizer: Any) -> None:
    """Raise a ValueError unless each teacher's tokenizer is the policy's."""
    for name, teacher in distillation.teachers.items():
        path = teacher.tokenizer_path
        assert path is not None, "filled in when the config was checked"
        template = policy_tokenizer.chat_template  # the policy's is used, so that its own may be missing
        tokenizer = load_tokenizer(path, None, teacher.trust_remote_code, default_template=template)
        for reason in differences(policy_tokenizer, tokenizer):
            raise ValueError(
                f"`{TEACHERS}.{name}` ({path}) must have the tokenizer of the policy: {reason}; choose a"
                " teacher of the policy's family"
            )


def differences(policy_tokenizer: Any, tokenizer: Any) -> Iterator[str]:
    """Yield why a teacher cannot read the policy's tokens. It may have more tokens than the policy."""
    policy, teacher = policy_tokenizer.get_vocab(), tokenizer.get_vocab()
    other = [token for token in policy if teacher.get(token) != policy[token]]
    if other:
        first = sorted(other, key=policy.__getitem__)[:MAX_SHOWN]
        shown = ", ".join(f"{token!r} is {policy[token]} and {teacher.get(token)}" for token in first)
        yield f"{len(other)} of {len(policy)} tokens have another id or none, such as: {shown}"
        return
    for text in TEXTS:
        pair = [one.encode(text, add_special_tokens=False) for one in (policy_tokenizer, tokenizer)]
        if pair[0] != pair[1]:
            yield f"it divides {text!r} into {len(pair[1])} tokens, and the policy's into {len(pair[0])}"
            return
