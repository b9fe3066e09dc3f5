# SPDX-License-Identifier: Apache-2.0
"""Routes: the experts of tokens in each layer, tensors (tokens, layers, k).

They are uint8, or int16 with more than 255 experts. A token whose experts are not known holds the mark
`unrouted(dtype)` everywhere.
"""

import torch
from torch import Tensor


def route_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype that holds the numbers of the experts and one more."""
    return torch.uint8 if experts <= torch.iinfo(torch.uint8).max else torch.int16


def unrouted(dtype: torch.dtype) -> int:
    """Return the mark of a token whose experts are not known."""
    return torch.iinfo(torch.uint8).max if dtype == torch.uint8 else -1


def join_routes(before: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Join the routes of a sequence's first tokens with those of a later pass over it, which knows more.

    Known ones stay: they sampled the tokens after them.
    """
    if before is None or later is None:
        return later if before is None else before
    return torch.cat([before, later[len(before) :]])


def extend_routes(routes: Tensor, tokens: int) -> Tensor:
    """Mark the tokens after the first ones as not routed: (n, L, k) to (tokens, L, k)."""
    rest = tokens - len(routes)
    if rest < 0:
        raise ValueError(f"a row of {tokens} tokens has routes of {len(routes)}")
    return torch.cat([routes, routes.new_full((rest, *routes.shape[1:]), unrouted(routes.dtype))])
