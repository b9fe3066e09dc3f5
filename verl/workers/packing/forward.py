# SPDX-License-Identifier: Apache-2.0
"""The one forward pass of actor, reference and critic: padded rows in, numbers for response tokens out.

Rows are packed into one line of tokens, run through the prepared model
(`verl.models.registry.prepare_model`), and the results are put back. Only tokens that predict a response
token reach the head. With sequence parallelism every rank of a line is called with the same rows, runs its
share of the frames through the vision tower and of the tokens through the language model, and returns the
results of all; or with rows of its own, where the micro-batch says so (`WholeRows`).
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verl.distributed.sequence_parallel import SequenceParallel
from verl.distributed.token_sharding import ShardPlan, shard_plan
from verl.models.attention.layouts import Layout, PackedLayout, SharedLayout
from verl.models.attention.sequence_parallel_layouts import sequence_layout
from verl.models.deferred_logits import DeferredLogits
from verl.models.fused_log_probs import TokenLogProbs
from verl.models.logit_chunks import HeadLogits
from verl.models.lora import adapters_disabled
from verl.models.registry import check_sequence_parallel, model_type_of, prompt_sharing_obstacle
from verl.models.vision import dummy_row, share_media
from verl.protocol import DataProto
from verl.utils.rank_logger import get_logger
from verl.workers.packing.micro_batches import rows_of_prompts
from verl.workers.packing.packed_batch import PackedBatch, separate_rows, shared_prompts
from verl.workers.packing.padding import unpack
from verl.workers.packing.schedule import BLANK, WholeRows, has_media
from verl.workers.packing.sp_rows import SPRows
from verl.workers.packing.sp_strategy import StrategyPlanner
from verl.workers.packing.vision_features import FrozenTower

logger = get_logger(__name__)

FEATURE_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class MediaFeatures(Protocol):
    """What makes model inputs of a row's media: `verl.data.media.loader.MediaLoader`."""

    def features(self, multi_modal_data: dict[str, Any], /) -> dict[str, Tensor]:
        """Pixels and grids of a row's images and videos, under the names of `FEATURE_KEYS`."""
        ...


class ModelInputs(NamedTuple):
    """A micro-batch as the model reads it."""

    arguments: dict[str, Any]  # of the model's packed forward
    places: Tensor  # (B, T): the packed token of each place; for padding, the row's token before it
    plan: ShardPlan | None  # None where this rank runs the whole line


class PackedForward:
    """Runs micro-batches through a prepared model.

    A micro-batch of no rows is run for the sake of FSDP's collectives, see `micro_batches`. Every method
    reads `input_ids`, `attention_mask`, `position_ids`, and `multi_modal_data` if it is there; where prompts
    are shared also `response_mask` and `uid`, without which each row has its own.

    Example::

        forward = PackedForward(model, model.config, media_loader, "cuda")
        result = forward.log_probs(micro, temperature=1.0, with_entropy=True)
        loss = (result.log_probs - 0.1 * result.entropy).sum()  # (B, R) each

        critic = PackedForward(value_model, value_model.config, media_loader, "cuda")
        values = critic.values(micro)  # (B, R)
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        media: MediaFeatures | None = None,
        device: torch.device | str = "cpu",
        share_prompt: bool = False,
        sp: SequenceParallel | None = None,
        tower: FrozenTower | None = None,
    ) -> None:
        """Hold the model.

        Args:
            model: Prepared, possibly under FSDP.
            config: Its transformers config.
            media: Decodes the rows' media; None if rows hold text only.
            device: Where the model computes.
            share_prompt: Run the prompt once for the rows of a micro-batch that have the same `uid` and the
                same prompt. A model whose attention does not allow it runs it for each, and the log says so.
            sp: The ranks that divide each line; None if every rank runs whole lines. Results are the same on
                all of them, and a loss of them gives each rank the gradient of its own tokens, so the
                gradient is the sum over the ranks of a line.
            tower: Gives the features of media that it holds, in place of the model's own tower.

        Raises:
            ValueError: The model's attention cannot be divided like that.
        """
        self.model, self.config, self.media, self.device = model, config, media, device
        self.tower = tower
        self.model_type = model_type_of(config)
        self.sp = SequenceParallel.none() if sp is None else sp
        check_sequence_parallel(config, self.sp)
        reason = prompt_sharing_obstacle(config) if share_prompt else None
        if reason is not None:
            logger.warning("prompts are not shared: model=%s reason=%s", config.model_type, reason)
        self.shares_prompts = share_prompt and reason is None

    @cached_property
    def division(self) -> StrategyPlanner:
        """Chooses how the ranks of a line share a pass."""
        return StrategyPlanner(self.sp.size)

    def media_tokens(self, batch: DataProto) -> list[int]:
        """(B,) tokens of each row that stand for media which the model's own tower encodes."""
        ids = batch.batch["input_ids"]
        if self.model_type.media_owner is None or self._holds_features:
            return [0] * len(ids)
        is_media = (ids == self.config.image_token_id) | (ids == self.config.video_token_id)  # (B, T)
        return is_media.sum(-1).tolist()

    def log_probs(
        self,
        micro: DataProto,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
        reference: "PackedForward | None" = None,
    ) -> TokenLogProbs:
        """Log-probabilities of the response tokens, and more about what they were drawn from.

        Args:
            micro: Reads `responses` and `response_mask` too.
            temperature: Divides the logits, the reference's as well.
            with_entropy: Compute the entropy too.
            with_sum_squares: Compute the sum of the squared probabilities of the vocabulary too.
            reference: Another model of the same family and vocabulary: compute KL(this || reference) over the
                vocabulary too. It runs first and without autograd; its head must stay gathered after its
                forward pass, as it does in the root FSDP group, and both models must be on the device.

        Returns:
            (B, R) float32 each, zero where `response_mask` is zero; None for what was not asked for.
        """
        response_mask = micro.batch["response_mask"].to(self.device)  # (B, R)
        targets = micro.batch["responses"].to(self.device)[response_mask.bool()]
        inputs = self._inputs(micro)
        rows = self._rows_before(inputs, response_mask)
        head = None if reference is None else reference._head_logits(inputs, micro, rows, temperature)

        def read(logits: DeferredLogits) -> TokenLogProbs:
            return logits.log_probs(
                rows.own(targets),
                rows.local,
                temperature,
                with_entropy=with_entropy,
                with_sum_squares=with_sum_squares,
                reference=head,
            )

        result: TokenLogProbs = self._run(inputs, read)
        log_probs, *others = (
            None if part is None else unpack(rows.joined(part), response_mask) for part in result
        )
        assert log_probs is not None, "log-probabilities are always computed"
        return TokenLogProbs(log_probs, *others)

    def values(self, micro: DataProto) -> Tensor:
        """The score of the state before each response token: at the token before it.

        Args:
            micro: Reads `response_mask` too.

        Returns:
            (B, R) float32, zero where `response_mask` is zero.
        """
        response_mask = micro.batch["response_mask"].to(self.device)  # (B, R)
        inputs = self._inputs(micro)
        return unpack(self._values_at(inputs, self._rows_before(inputs, response_mask)), response_mask)

    def last_values(self, micro: DataProto) -> Tensor:
        """The score of each sequence, at its last attended token: (B,) float32."""
        inputs = self._inputs(micro)
        return self._values_at(inputs, SPRows.of(inputs.places[:, -1], inputs.plan, self.sp))

    def _values_at(self, inputs: ModelInputs, rows: SPRows) -> Tensor:
        return rows.joined(self._run(inputs, lambda logits: logits.values(rows.local)))

    @torch.no_grad()
    def _head_logits(
        self, inputs: ModelInputs, micro: DataProto, rows: SPRows, temperature: float
    ) -> HeadLogits:
        """Of another model's inputs; features of media are this model's own."""
        if "media_features" in inputs.arguments:
            inputs = self._inputs(micro)
        return self._run(inputs, lambda logits: logits.head_logits(rows.local, temperature))

    def _rows_before(self, inputs: ModelInputs, response_mask: Tensor) -> SPRows:
        """The packed token before each response token, which predicts it."""
        before = inputs.places[:, -response_mask.shape[1] - 1 : -1][response_mask.bool()]
        return SPRows.of(before, inputs.plan, self.sp)

    def _run(self, inputs: ModelInputs, read: Callable[[DeferredLogits], Any]) -> Any:
        """What `read` makes of the logits inside the forward pass, where FSDP has the head at hand."""
        return self.model(**inputs.arguments, read=read)

    def _inputs(self, micro: DataProto) -> ModelInputs:
        """Pack the rows into a line, and decode their media."""
        line = self._line(micro)
        line, media = self._with_media(line, micro)
        positions = line.position_ids if len(line.position_ids) == 1 else line.position_ids[:, None]
        arguments: dict[str, Any] = {
            "input_ids": line.input_ids[None],
            "position_ids": positions,
        }
        is_whole = self.sp.size == 1 or WholeRows.of(micro) is not None
        plan = None if is_whole else shard_plan(line.groups, self.sp, self.device)
        if plan is None:
            arguments["packed_layout"] = _layout(line, self.device)
        else:
            arguments |= {"packed_layout": sequence_layout(plan, self.sp), "local_tokens": plan.local}
        return ModelInputs(arguments | media, line.places, plan)

    def _line(self, micro: DataProto) -> PackedBatch:
        """The rows as one line, the prompts of those that have the same one shared."""
        tensors = micro.batch
        input_ids, mask = tensors["input_ids"].to(self.device), tensors["attention_mask"].to(self.device)
        positions = self._position_rows(tensors["position_ids"].to(self.device))
        if self.shares_prompts and "response_mask" in tensors:
            prompt_width = input_ids.shape[1] - tensors["response_mask"].shape[1]
            prompts = [columns[:, :prompt_width] for columns in (input_ids, mask, *positions)]
            members = _with_equal_prompts(rows_of_prompts(micro), prompts)
            if any(len(rows) > 1 for rows in members):
                return shared_prompts(input_ids, mask, positions, members, prompt_width)
        return separate_rows(input_ids, mask, positions)

    def _position_rows(self, positions: Tensor) -> Tensor:
        """(B, T) or (B, 4, T) to (rows, B, T)."""
        rows = self.model_type.position_rows
        if positions.ndim == 2:
            positions = positions[:, None].expand(-1, rows, -1)
        if positions.shape[1] != rows:
            raise ValueError(
                f"`position_ids` must have {rows} rows for {self.config.model_type}, got {positions.shape[1]}"
            )
        return positions.transpose(0, 1)

    def _with_media(self, line: PackedBatch, micro: DataProto) -> tuple[PackedBatch, dict[str, Any]]:
        """The rows' media, each distinct one once, and one more row where FSDP needs something to run."""
        media = micro.non_tensor_batch.get("multi_modal_data")
        shown = () if media is None else [media[row] for row in line.shown]
        rows = [row for row in shown if has_media(row)]
        if not rows and self.model_type.media_owner is not None and not self._holds_features:
            line, rows = line.joined(dummy_row(self.config).input_ids.to(self.device)), [BLANK]
        if rows:
            return line, self._held_features(rows) if self._holds_features else self._features(rows, micro)
        if not len(line.input_ids):
            return line.joined(line.input_ids.new_zeros(1)), {}
        return line, {}

    @property
    def _holds_features(self) -> bool:
        """Whether the features of all media are at hand; then no rank runs the model's tower."""
        return self.tower is not None and self.tower.held is not None

    def _held_features(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        assert self.tower is not None, "it holds the media of the batch"
        return {"media_features": self.tower.features(rows)}

    def _features(self, rows: list[dict[str, Any]], micro: DataProto) -> dict[str, Any]:
        """Model inputs for the rows' media, and which of them each place in the tokens shows.

        Where ranks encode together, there are inputs for the media of all of their rows.
        """
        whole = WholeRows.of(micro)
        together = None if whole is None else whole.media
        order: dict[str, list[int]] = {"image_order": [], "video_order": []}
        counts = {"image_order": 0, "video_order": 0}
        first: dict[Any, dict[str, range]] = {}  # where a distinct row's media stand among all
        features: dict[str, list[Tensor]] = {}
        for row in rows if together is None else together:
            key = _media_key(row)
            if key not in first:
                values = self._row_features(row)
                first[key] = {}
                for name, grid in (("image_order", "image_grid_thw"), ("video_order", "video_grid_thw")):
                    number = len(values[grid]) if grid in values else 0
                    first[key][name] = range(counts[name], counts[name] + number)
                    counts[name] += number
                for name in FEATURE_KEYS:
                    if name in values:
                        features.setdefault(name, []).append(values[name])
        for row in rows:
            for name, places in first[_media_key(row)].items():
                order[name].extend(places)
        media = {name: torch.cat(values) for name, values in features.items()}
        is_shared = self.sp.size > 1 and (whole is None or together is not None)
        return self._to_device(media, is_shared) | order

    def _row_features(self, row: dict[str, Any]) -> dict[str, Tensor]:
        if not has_media(row):
            return dummy_row(self.config).media
        if self.model_type.media_owner is None or self.media is None:
            raise ValueError(f"rows hold media, which {self.config.model_type} is not known to read")
        return self.media.features(row)

    def _to_device(self, media: dict[str, Tensor], is_shared: bool) -> dict[str, Any]:
        """The media that this rank encodes, and where others encode some, how they are divided."""
        share = {}
        if is_shared:
            media, share["media_share"] = share_media(self.config, media, self.sp)
        return {name: value.to(self.device) for name, value in media.items()} | share


class BaseForward(PackedForward):
    """The forward pass through the base of a model with adapters: as if they were not there."""

    def _run(self, inputs: ModelInputs, read: Callable[[DeferredLogits], Any]) -> Any:
        with adapters_disabled(self.model):
            return super()._run(inputs, read)


def _layout(line: PackedBatch, device: torch.device | str) -> Layout:
    """Which tokens of the line see which."""
    return SharedLayout.of(line.groups, device) if line.is_shared else PackedLayout.of(line.cu_seqlens)


def _with_equal_prompts(candidates: list[list[int]], prompts: list[Tensor]) -> list[list[int]]:
    """Groups in which all `prompts` (B, P) are equal to the first row's; the other rows stand alone."""
    pairs = [(row, rows[0]) for rows in candidates for row in rows[1:]]
    if not pairs:
        return candidates
    equal = [
        torch.stack([(part[row] == part[first]).all() for part in prompts]).all() for row, first in pairs
    ]
    strangers = {row for (row, _), same in zip(pairs, torch.stack(equal).tolist(), strict=True) if not same}
    members = [[row for row in rows if row not in strangers] for rows in candidates]
    return members + [[row] for row in sorted(strangers)]


def _media_key(row: dict[str, Any]) -> tuple:
    """What tells one row's media from another's: the references themselves."""
    return tuple(
        (kind, tuple(tuple(sorted(ref.items())) if isinstance(ref, dict) else ref for ref in refs))
        for kind, refs in sorted(row.items())
        if refs
    )
