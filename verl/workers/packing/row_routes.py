# SPDX-License-Identifier: Apache-2.0
"""Routes of rows: the experts of each token and layer, packed, divided and unpacked with the tokens.

A row holds them in its column as a tensor (tokens, L, k), of its prompt and response without padding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from verl.batch_keys import BatchError
from verl.models.mixture.routes import unrouted
from verl.models.mixture.routing import TokenOwners
from verl.utils.plain_data import objects
from verl.workers.packing.sp_rows import SPRows


class RouteUse(NamedTuple):
    """A column of routes, and what a pass does with it."""

    column: str
    replays: bool  # else it compares only


class RoutedTokens(NamedTuple):
    """The tokens of a packed batch as the routers' recorders read them."""

    owners: TokenOwners
    tokens: SPRows  # of every row, one after another
    given: Tensor | None  # (n, L, k) routes of this rank's tokens


@dataclass
class RowRoutes:
    """Observed routes of forward passes, one entry each.

    Attributes:
        use: None to record only.
        matches: (b, 2) float32 as `ROUTE_MATCHES`; none without a use or its column.
        routes: (b, T, L * k) of the rows' tokens, `unrouted` on padding; none unless recorded.
    """

    use: RouteUse | None
    records: bool = False
    matches: list[Tensor] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)


def pack_routes(
    rows: Sequence[Tensor | None], mask: Tensor, positions: Tensor, length: int, like: Tensor
) -> Tensor:
    """Pack the routes of padded rows: (length, L, k), `unrouted` where nothing is known.

    Args:
        rows: (tokens, L, k) each; None: not known.
        mask: (B, T).
        positions: (B, T): packed position of each token. That of a shared prompt has its first row's routes.
        length: Packed tokens.
        like: (0, L, k) of the dtype.
    """
    packed = like.new_full((length, *like.shape[1:]), unrouted(like.dtype))
    for row in reversed(range(len(rows))):
        routes = rows[row]
        if routes is None:
            continue
        places = positions[row][mask[row].bool()]
        if routes.shape != (len(places), *like.shape[1:]) or routes.dtype != like.dtype:
            raise BatchError(
                f"row {row} of {len(places)} tokens has routes {routes.dtype} {tuple(routes.shape)}, and the"
                f" model's are {like.dtype} {(len(places), *like.shape[1:])}"
            )
        packed[places] = routes
    return packed


def pad_routes(values: Tensor, mask: Tensor) -> Tensor:
    """Put the routes (M, L, k) of all rows' tokens in their rows (B, T, L * k)."""
    padded = values.new_full((*mask.shape, math.prod(values.shape[1:])), unrouted(values.dtype))
    padded[mask.bool()] = values.flatten(1)
    return padded


def column_of(padded: Tensor, mask: Tensor, layers: int) -> np.ndarray:
    """Return the column of routes (B, T, L * k): an object array of (tokens, L, k)."""
    rows = zip(padded, mask.bool(), strict=True)
    return objects(routes[keep].unflatten(1, (layers, -1)) for routes, keep in rows)
