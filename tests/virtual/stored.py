# SPDX-License-Identifier: Apache-2.0
"""Files of a model without values: the project's reader of real ones takes what it needs from them.

Names, shapes and data types are those of a release on the hub, in bfloat16 or with linear weights in FP8.
Like pages of real files, which the system may drop, they take no host memory; what is made of them does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.virtual.tally import Tally

BLOCK = 128  # rows and columns that share a scale
LINEAR = re.compile(r"_(proj|with_mqa)\.weight$")  # not the embeddings, the head or routers
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}  # in headers
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])


class VirtualSlice:
    """A tensor of a file, as `safe_open` gives it."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, fake: FakeTensorMode, tally: Tally) -> None:
        self.size, self.dtype, self.fake, self.tally = size, dtype, fake, tally

    def get_shape(self) -> list[int]:
        return list(self.size)

    def get_dtype(self) -> str:
        return DTYPES[self.dtype]

    def __getitem__(self, _: Any) -> Tensor:
        with self.fake:
            pages = torch.empty(self.size, dtype=self.dtype)
        self.tally.host.ignore(pages)
        return pages


class VirtualFile:
    """An open file of a model."""

    def __init__(self, tensors: Mapping[str, VirtualSlice]) -> None:
        self.keys, self.get_slice = tensors.keys, tensors.__getitem__

    def __exit__(self, *_: object) -> None: ...


def write_virtual_files(folder: Path, *, in_fp8: bool) -> None:
    """Let a folder with a model's config be taken for a whole release."""
    (folder / "model.safetensors").touch()
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16"} | ({"quantization_config": FP8} if in_fp8 else {})
    (folder / "config.json").write_text(json.dumps(config))


def read_virtual_files(fake: FakeTensorMode, tally: Tally, *, in_fp8: bool) -> None:
    """Let `from_pretrained` open virtual files instead of real ones."""
    from transformers import AutoConfig, modeling_utils

    def safe_open(path: str, **_: Any) -> VirtualFile:
        config = AutoConfig.from_pretrained(Path(path).parent)
        return VirtualFile(
            {name: VirtualSlice(*each, fake, tally) for name, each in stored(config, in_fp8=in_fp8)}
        )

    modeling_utils.safe_open = safe_open


def stored(config: Any, *, in_fp8: bool) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield the names, shapes and data types of a release's tensors."""
    from verl.models.hub_names import HubNames

    for name, size in HubNames(config).hub_shapes.items():
        if in_fp8 and LINEAR.search(name):
            yield name, (tuple(size), torch.float8_e4m3fn)
            yield f"{name}_scale_inv", (tuple(-(-each // BLOCK) for each in size), torch.float32)
        else:
            yield name, (tuple(size), torch.bfloat16)
