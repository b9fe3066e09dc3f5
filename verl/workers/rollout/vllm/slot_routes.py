# SPDX-License-Identifier: Apache-2.0
"""Routes of the tokens that vLLM runs: (tokens, L, k) for each sequence, without its last token.

On GPUs vLLM returns them with a response. On CPU, whose model runner cannot, they are recorded here, by slot
of the cache: a token that comes from the prefix cache has a slot whose routes an earlier request has left.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.models.mixture.routes import route_dtype, unrouted


class ReturnedRoutes:
    """Routes that vLLM returns with a response (`enable_return_routed_experts`)."""

    def __init__(self, model: Any, experts: int) -> None:
        self.layers = [router.layer_id for router in expert_layers(model)]
        self.dtype = route_dtype(experts)

    def routes(self, request: str, sampled: int, completion: Any) -> Tensor | None:
        """Return (tokens, L, k) of a request's prompt and of its response without the last token.

        Args:
            request: vLLM's internal name.
            sampled: Tokens of the response.
            completion: vLLM's output; None if the request was interrupted.
        """
        returned = None if completion is None else completion.routed_experts
        if returned is None:
            return None
        # (tokens, all layers, k), where dense layers hold zeros
        return torch.from_numpy(returned[:, self.layers].astype("int64")).to(self.dtype)


class SlotRoutes:
    """Routes by slot of vLLM's cache, where its routers leave them in each forward pass."""

    def __init__(self, model: Any, runner: Any, experts: int) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415 - after vLLM's environment

        cache, layers = runner.kv_cache_config, expert_layers(model)
        groups = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in cache.kv_cache_groups]
        assert any(groups), "a layer that attends to all tokens keeps a slot of each"
        self.runner, self.group = runner, groups.index(True)
        group = cache.kv_cache_groups[self.group]
        self.layer_name, self.block_size = group.layer_names[0], group.kv_cache_spec.block_size
        shape = (cache.num_blocks * self.block_size, len(layers), layers[0].router.top_k)
        dtype = route_dtype(experts)
        self.table = torch.full(shape, unrouted(dtype), dtype=dtype)  # (slots, L, k)
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._keep, number))

    def routes(self, request: str, sampled: int, completion: Any) -> Tensor | None:
        """Return what `ReturnedRoutes.routes` does."""
        # the runner forgets a request, and its blocks are used again, in the next step
        state = self.runner.requests.get(request)
        if state is None or sampled < 1:
            return None
        tokens = state.num_prompt_tokens + sampled - 1
        blocks = torch.tensor(state.block_ids[self.group])
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        return self.table[slots[:tokens]]

    def _keep(self, layer: int, experts: Tensor) -> None:
        from vllm.forward_context import get_forward_context  # noqa: PLC0415 - after vLLM's environment

        mapping = get_forward_context().slot_mapping
        assert isinstance(mapping, dict), "a pass on CPU is not cut into several"
        slots = mapping.get(self.layer_name)
        if slots is None:  # a pass that only measures memory
            return
        is_token = slots >= 0
        self.table[slots[is_token], layer] = experts[is_token].to(self.table.dtype)


def expert_layers(model: Any) -> list[Any]:
    """Return vLLM's modules that choose and run experts, by layer."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import (  # noqa: PLC0415 - see above
        MoERunner,
    )

    found = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(found, key=lambda layer: layer.layer_id)
