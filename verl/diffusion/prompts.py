# SPDX-License-Identifier: Apache-2.0
"""Encodes prompts once with the text encoders, and keeps what the transformer reads in host memory."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from verl.diffusion.families.interface import Conditions, DiffusionFamily

MAX_BYTES = 4 << 30  # of conditions in host memory; the least recently used are encoded again


class PromptEncoder:
    """Encodes prompts with the frozen text encoders, which are on the device only meanwhile.

    Args:
        pipeline: With the text encoders of the model.
        max_length: Tokens of a prompt that the longest encoder reads.
        loaded: Keeps the text encoders on the device inside a block.
    """

    def __init__(
        self,
        family: DiffusionFamily,
        pipeline: Any,
        device: torch.device,
        max_length: int,
        loaded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.family, self.pipeline, self.device, self.max_length = family, pipeline, device, max_length
        self.loaded = loaded
        self._known: OrderedDict[str, Conditions] = OrderedDict()  # of one row, as long as its prompt
        self._size = 0
        self.num_encoded = 0

    def encode(self, texts: Sequence[str]) -> Conditions:
        """Return what the transformer reads of each text, (B, ...) by argument, on the device."""
        self._encode_unknown(texts)
        joined = self.family.join([self._known[text] for text in texts])
        return {name: values.to(self.device) for name, values in joined.items()}

    def prepare(self, texts: Sequence[str]) -> None:
        """Encode what is not known yet of a phase, in one visit of the encoders to the device."""
        self._encode_unknown(texts)
        for text in texts:
            self._known.move_to_end(text)
        self._forget(keep=len(set(texts)))

    def _encode_unknown(self, texts: Sequence[str]) -> None:
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        if missing:
            self._encode(missing)

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> None:
        with self.loaded():
            for text in texts:
                found = self.family.encode(self.pipeline, [text], self.max_length)
                self._known[text] = {name: values.cpu() for name, values in found.items()}
                self._size += _size(self._known[text])
        self.num_encoded += len(texts)

    def _forget(self, keep: int) -> None:
        while self._size > MAX_BYTES and len(self._known) > keep:
            self._size -= _size(self._known.popitem(last=False)[1])


def _size(conditions: Conditions) -> int:
    return sum(values.nbytes for values in conditions.values())
