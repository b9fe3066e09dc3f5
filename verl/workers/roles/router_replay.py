# SPDX-License-Identifier: Apache-2.0
"""Replay of routes in the policy's passes: `worker.actor.router_replay`.

    off   every pass chooses experts itself
    r2    the update replays the choices of the pass that computes `old_log_probs`
    r3    both replay the choices of the rollout engine

The reference and the critic always choose for themselves: their weights are others. So does a token whose
experts are not known, such as the last one of a response, which no engine ever runs.
"""

from verl.batch_keys import ENGINE_ROUTES, OLD_ROUTES, ROUTE_MATCHES
from verl.protocol import DataProto
from verl.workers.packing.row_routes import RouteUse

# Metrics: share of the experts in the given routes which a router chooses as well.
ROUTE_AGREEMENT = "moe/route_agreement"  # of the engine and the trainer, before the update
REPLAY_AGREEMENT = "moe/replay_agreement"  # of the replayed routes and the update


class RouterReplay:
    """The columns of routes that each pass of the policy reads, and what it does with them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.records = mode == "r2"  # the pass before the update

    def in_old_pass(self, batch: DataProto) -> RouteUse | None:
        """Return the routes that the pass before the update reads."""
        self._check(batch)
        return RouteUse(ENGINE_ROUTES, self.mode == "r3") if _has(batch, ENGINE_ROUTES) else None

    def in_update(self, batch: DataProto) -> tuple[RouteUse | None, str]:
        """Return the routes that the update reads, and the name of their metric.

        An update without a pass before it replays nothing with r2: its own choices are the old ones.
        """
        self._check(batch)
        column = OLD_ROUTES if self.records else ENGINE_ROUTES
        is_compared = ROUTE_MATCHES in batch.batch
        if self.mode != "off" and _has(batch, column):
            name = REPLAY_AGREEMENT if self.records or is_compared else ROUTE_AGREEMENT
            return RouteUse(column, True), name
        if _has(batch, ENGINE_ROUTES) and not is_compared:
            return RouteUse(ENGINE_ROUTES, False), ROUTE_AGREEMENT
        return None, ""

    def _check(self, batch: DataProto) -> None:
        if self.mode == "r3" and not _has(batch, ENGINE_ROUTES):
            raise ValueError(
                "`worker.actor.router_replay=r3` needs the engine's routes, and the rows have no"
                f" `{ENGINE_ROUTES}`: use r2, which needs none"
            )


def _has(batch: DataProto, column: str) -> bool:
    return column in batch.non_tensor_batch
