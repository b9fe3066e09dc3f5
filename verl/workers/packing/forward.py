# SPDX-License-Identifier: Apache-2.0
"""The packed forward pass of actor, reference and critic: padded rows in, numbers for response tokens out.

Only tokens that predict a response token reach the head. Under sequence parallelism all ranks of a group get
the same rows, run their shard of the frames and tokens, and return all results; or each rank gets rows of its
own (`WholeRows`).

Micro batches are packed on CPU, and go to the device in one copy for each dtype. Nothing is read back.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.data.media.loader import MediaLoader
from verl.distributed.device import to_device
from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import ShardPlan, SPRows, shard_plan
from verl.models.attention.layouts import PackedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout
from verl.models.deferred_logits import DeferredLogits
from verl.models.families.interface import ExampleRow, Kind, MediaFamily, Medium
from verl.models.families.registry import family_of
from verl.models.flops import FlopsCounter, PackedWork
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.head.logit_chunks import HeadLogits
from verl.models.head.top_tokens import Divergence
from verl.models.lora import adapters_disabled
from verl.models.mixture.routing import Router, routers_of
from verl.models.registry import check_sequence_parallel, prompt_sharing_obstacle
from verl.models.vision import blocks_of, share_media
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger
from verl.workers.packing.media_inputs import (
    BLANK,
    MEDIA_KEYS,
    MediaRow,
    WholeRows,
    has_media,
    media_in_packing_order,
    media_inputs,
)
from verl.workers.packing.micro_batches import context_cuts, rows_sharing_prompts
from verl.workers.packing.observers import PackedRows, PassTokens
from verl.workers.packing.packed_batch import PackedBatch, ResponseTokens, pack_rows
from verl.workers.packing.row_forward import RowForward
from verl.workers.packing.vision_features import FrozenTower

logger = get_logger(__name__)

# what `PackedForward` reads of a batch
FORWARD_KEYS = ["input_ids", "attention_mask", "position_ids", "responses", "loss_mask"]
OBJECT_KEYS = ["uid", "context_starts", *MEDIA_KEYS]


class ModelInputs(NamedTuple):
    """A micro batch as the model reads it; its tensors are on CPU until `to_device`."""

    arguments: dict[str, Any]  # of the model's packed forward
    positions: Tensor  # (B, T): packed position of each token; on padding, of the row's token before it
    plan: ShardPlan | None  # None where this rank runs the whole sequence


class PackedForward(RowForward):
    """Runs micro batches of packed tokens through a prepared model.

    Reads `input_ids`, `attention_mask`, `position_ids`, and `MEDIA_KEYS` if present; to share
    prompts `responses` and `uid` too. Tensors of micro batches are on CPU, results on the device.

    Example::

        forward = PackedForward(model, media_loader, "cuda")
        result = forward.log_probs(micro, temperature=1.0, with_entropy=True)
        loss = (result.log_probs - 0.1 * result.entropy).sum()  # (B, R) each
    """

    keys, object_keys = FORWARD_KEYS, OBJECT_KEYS

    def __init__(
        self,
        model: PreTrainedModel,  # prepared by `prepare_model`, possibly under FSDP
        media: MediaLoader | None = None,  # None if rows hold text only
        device: torch.device | str = "cpu",
        share_prompt: bool = False,  # run a prompt once for all of its rows, if the attention allows it
        sp: SequenceParallel | None = None,  # ranks that shard each sequence; gradients are their sum
        tower: FrozenTower | None = None,  # provides the features of media instead of the model's own tower
        flops: FlopsCounter | None = None,  # counts what this rank runs
    ) -> None:
        super().__init__(model, device, SequenceParallel() if sp is None else sp)
        self.config, self.media, self.tower, self.flops = model.config, media, tower, flops
        self.family = family_of(self.config)
        self.reader = self.family if isinstance(self.family, MediaFamily) else None
        check_sequence_parallel(self.config, self.sp)
        reason = prompt_sharing_obstacle(self.config) if share_prompt else None
        if reason is not None:
            logger.warning("prompts are not shared: model=%s reason=%s", self.config.model_type, reason)
        self.shares_prompts = share_prompt and reason is None

    def routers(self) -> list[Router]:
        return routers_of(self.model)

    def media_tokens(self, batch: DataProto) -> list[int]:
        ids = batch.batch["input_ids"]
        if self.reader is None or self._has_features:
            return [0] * len(ids)
        found = torch.cat(list(self.reader.media_tokens(self.config, ids.flatten()).values()))
        return (found // ids.shape[1]).bincount(minlength=len(ids)).tolist()

    def log_probs(
        self,
        micro: DataProto,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: "PackedForward | None" = None,
        divergence: Divergence | None = None,
    ) -> TokenLogProbs:
        """Compute log-probs of the tokens of `loss_mask`, and statistics of the distributions they come from.

        Args:
            micro: Reads `responses` and `loss_mask` too.
            temperature: Divides the logits, the reference's as well.
            with_entropy: Also compute the entropy.
            with_sum_squares: Also compute the sum of the squared probabilities over the vocabulary.
            reference: Also compute KL(this || reference) over the vocabulary. It runs without autograd on
                the same device; its head must stay gathered after its forward pass (root FSDP group).
            divergence: Also compute the divergence from these targets.

        Returns:
            (B, R) float32 each, zero where `loss_mask` is zero; None for what was not requested.
        """
        responses = ResponseTokens.of(micro.batch["loss_mask"])
        inputs = self._inputs(micro, len(responses.index))
        rows = SPRows.of(responses.before(inputs.positions), inputs.plan, self.sp)
        targets = rows.select(responses.take(micro.batch["responses"]))
        places = None if divergence is None else divergence.places(len(responses.index), rows)
        arguments, rows, targets, responses, places = to_device(
            (inputs.arguments, rows, targets, responses, places), self.device
        )
        head = None if reference is None else reference._head_logits(arguments, micro, rows, temperature)

        def read(logits: DeferredLogits) -> TokenLogProbs:
            result = logits.log_probs(
                targets,
                rows.local,
                temperature,
                with_entropy=with_entropy,
                with_sum_squares=with_sum_squares,
                reference=head,
            )
            if divergence is None or places is None:
                return result
            return result._replace(divergence=divergence(logits.head_logits(rows.local, temperature), places))

        result: TokenLogProbs = self._run(arguments, read)
        log_probs, *others = (
            None if part is None else responses.unpack(rows.gather(part)) for part in result
        )
        assert log_probs is not None, "log-probs are always computed"
        return TokenLogProbs(log_probs, *others)

    @torch.no_grad()
    def head_logits(self, micro: DataProto, temperature: float) -> HeadLogits:
        """Compute the factors of the logits that predict the tokens of `loss_mask`, row by row.

        They are of all tokens on every rank that shares a sequence. The head must stay gathered after the
        forward pass (root FSDP group).
        """
        responses = ResponseTokens.of(micro.batch["loss_mask"])
        inputs = self._inputs(micro, len(responses.index))
        rows = SPRows.of(responses.before(inputs.positions), inputs.plan, self.sp)
        arguments, rows = to_device((inputs.arguments, rows), self.device)
        head = self._run(arguments, lambda logits: logits.head_logits(rows.local, temperature))
        return head._replace(hidden=rows.gather(head.hidden))

    def values(self, micro: DataProto) -> Tensor:
        """Compute the value before each token of `loss_mask`: (B, R) float32, zero elsewhere."""
        responses = ResponseTokens.of(micro.batch["loss_mask"])
        inputs = self._inputs(micro)
        rows = SPRows.of(responses.before(inputs.positions), inputs.plan, self.sp)
        arguments, rows, responses = to_device((inputs.arguments, rows, responses), self.device)
        return responses.unpack(self._values_at(arguments, rows))

    def last_values(self, micro: DataProto) -> Tensor:
        """Compute the score of each sequence at its last token: (B,) float32."""
        inputs = self._inputs(micro)
        rows = SPRows.of(inputs.positions[:, -1], inputs.plan, self.sp)
        return self._values_at(*to_device((inputs.arguments, rows), self.device))

    @torch.no_grad()
    def run(self, micro: DataProto) -> None:
        """Run the model for its observers only."""
        self._run(to_device(self._inputs(micro).arguments, self.device), lambda _: None)

    def _values_at(self, arguments: dict[str, Any], rows: SPRows) -> Tensor:
        return rows.gather(self._run(arguments, lambda logits: logits.values(rows.local)))

    @torch.no_grad()
    def _head_logits(
        self, arguments: dict[str, Any], micro: DataProto, rows: SPRows, temperature: float
    ) -> HeadLogits:
        # the arguments are those of another model, whose media features this model cannot use
        if "media_features" in arguments:
            inputs = self._inputs(micro, arguments["work"].to_head)
            arguments = to_device(inputs.arguments, self.device)
        arguments = {name: value for name, value in arguments.items() if name != "observed"}
        return self._run(arguments, lambda logits: logits.head_logits(rows.local, temperature))

    def _run(self, arguments: dict[str, Any], read: Callable[[DeferredLogits], Any]) -> Any:
        # `read` runs inside the forward pass, where FSDP keeps the head gathered
        arguments = dict(arguments)
        work = arguments.pop("work")
        if self.flops is not None:
            self.flops.add(work, arguments.get("media", ()))
        tokens, read_by_observers = arguments.pop("observed", (None, ()))
        if tokens is None:
            return self.model(**arguments, read=read)
        with ExitStack() as stack:
            watched = [
                stack.enter_context(observer.watching(tokens, inputs))
                for observer, inputs in zip(self.observers, read_by_observers, strict=True)
            ]
            result = self.model(**arguments, read=read)
        for columns in watched:
            self._columns.update(columns)
        return result

    def _inputs(self, micro: DataProto, to_head: int = 0) -> ModelInputs:
        packed, media_rows = self._with_media(self._pack(micro), micro)
        positions = packed.position_ids if len(packed.position_ids) == 1 else packed.position_ids[:, None]
        arguments: dict[str, Any] = {"input_ids": packed.input_ids[None], "position_ids": positions}
        plan, blocks = None, blocks_of(self.family, self.config, packed.input_ids)
        if self.sp.size > 1 and WholeRows.of(micro) is None:
            plan = shard_plan(packed.groups, self.sp)
            layout = sequence_layout(plan, self.sp, self.device, blocks)
            arguments |= {"packed_layout": layout, "local_tokens": plan.local}
        else:
            arguments["packed_layout"] = PackedLayout.of_groups(packed.groups, self.device, blocks)
        arguments["work"] = PackedWork(packed.groups, to_head, 1 if plan is None else self.sp.size)
        if media_rows:
            arguments |= self._media(media_rows, micro, packed.input_ids, plan)
        if self.observers:
            arguments["observed"] = self._observed(packed, plan, micro)
        return ModelInputs(arguments, packed.positions, plan)

    def _observed(
        self, packed: PackedBatch, plan: ShardPlan | None, micro: DataProto
    ) -> tuple[PassTokens, tuple[Any, ...]]:
        """Return the tokens of a pass, and what each observer reads."""
        mask = micro.batch["attention_mask"]
        rows, columns = mask.nonzero(as_tuple=True)
        tokens = SPRows.of(packed.positions[rows, columns], plan, self.sp)
        held = len(packed.input_ids) if plan is None else len(plan.local)
        weights = torch.bincount(tokens.local, minlength=held)
        where = PackedRows(mask, packed.positions, len(packed.input_ids), plan)
        response_length = micro.batch["responses"].shape[1] if "responses" in micro.batch else 0
        watched = PassTokens(mask, response_length, tokens, tokens.select(rows), weights)
        return watched, tuple(observer.inputs(micro, where) for observer in self.observers)

    def _media(
        self, rows: list[MediaRow], micro: DataProto, input_ids: Tensor, plan: ShardPlan | None
    ) -> dict[str, Any]:
        """Return the media of packed rows, or their features, and the tokens that these replace."""
        assert self.reader is not None, "rows with media were refused"
        found = self.reader.media_tokens(self.config, input_ids).items()
        tokens: dict[Kind, SPRows] = {kind: SPRows.of(places, plan, self.sp) for kind, places in found}
        if not self._has_features:
            return self._encoded_media(rows, micro) | {"media_rows": tokens}
        assert self.tower is not None, "it provides the features"
        features = self.tower.features(rows, {kind: each.owned for kind, each in tokens.items()})
        selected = {kind: each._replace(owned=None) for kind, each in tokens.items()}
        return {"media_features": features, "media_rows": selected}

    def _pack(self, micro: DataProto) -> PackedBatch:
        tensors = micro.batch
        input_ids, mask = tensors["input_ids"], tensors["attention_mask"]
        position_ids = self._position_rows(tensors["position_ids"])
        members, prompt_width = [[row] for row in range(len(mask))], 1
        if self.shares_prompts and "responses" in tensors:
            sharing = rows_sharing_prompts(micro)
            if any(len(rows) > 1 for rows in sharing):
                members, prompt_width = sharing, input_ids.shape[1] - tensors["responses"].shape[1]
        return pack_rows(input_ids, mask, position_ids, members, prompt_width, context_cuts(micro))

    def _position_rows(self, position_ids: Tensor) -> Tensor:
        # (B, T) or (B, 4, T) to (rows, B, T)
        rows = self.family.position_rows
        if position_ids.ndim == 2:
            position_ids = position_ids[:, None].expand(-1, rows, -1)
        if position_ids.shape[1] != rows:
            raise ValueError(
                f"`position_ids` must have {rows} rows for {self.config.model_type},"
                f" got {position_ids.shape[1]}"
            )
        return position_ids.transpose(0, 1)

    def _with_media(self, packed: PackedBatch, micro: DataProto) -> tuple[PackedBatch, list[MediaRow]]:
        """Return the rows that have media; a dummy row is appended where FSDP needs something to run."""
        rows = media_in_packing_order(micro, packed.rows)
        if not rows and self.reader is not None and not self._has_features:
            return packed.append(self._blank.input_ids), [BLANK]
        if not len(packed.input_ids):
            packed = packed.append(packed.input_ids.new_zeros(1))
        return packed, rows

    @property
    def _has_features(self) -> bool:
        # then no rank runs the model's own tower
        return self.tower is not None and self.tower.held is not None

    @cached_property
    def _blank(self) -> ExampleRow:
        assert self.reader is not None, "text models need no blank image"
        return self.reader.example(self.config, None if self.media is None else self.media.processor)

    def _encoded_media(self, rows: list[MediaRow], micro: DataProto) -> dict[str, Any]:
        # where ranks encode together, the inputs are of all ranks' rows
        whole = WholeRows.of(micro)
        together = None if whole is None else whole.media
        assert self.reader is not None, "rows with media were refused"
        encoded = rows if together is None else together
        media, order = media_inputs(rows, encoded, self._row_media, self.reader.token_kind)
        share = None
        if self.sp.size > 1 and (whole is None or together is not None):
            media, share = share_media(self.reader, self.config, media, self.sp, self._blank.media)
        return {"media": media, "media_order": order, "media_share": share}

    def _row_media(self, row: MediaRow) -> list[Medium]:
        if not has_media(row):
            return self._blank.media
        if self.reader is None or self.media is None:
            raise ValueError(f"rows hold media, which {self.config.model_type} is not known to read")
        return self.media.media(row)


class BaseForward(PackedForward):
    """The forward pass through the base of a model, with its adapters disabled."""

    def _run(self, arguments: dict[str, Any], read: Callable[[DeferredLogits], Any]) -> Any:
        with adapters_disabled(self.model):
            return super()._run(arguments, read)
