# SPDX-License-Identifier: Apache-2.0
"""The one forward pass of actor, reference and critic: padded rows in, numbers for response tokens out.

Rows are packed into one line of tokens, run through the prepared model
(`verl.models.registry.prepare_model`), and the results are put back. Only tokens that predict a response
token reach the head. Sharding the line over sequence-parallel ranks belongs between packing and the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verl.models.causal_head import DeferredLogits
from verl.models.registry import model_type_of
from verl.models.vision import dummy_row
from verl.protocol import DataProto
from verl.utils.head_logits import HeadLogits
from verl.utils.padding import pack, unpack
from verl.utils.torch_functional import TokenLogProbs

FEATURE_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class MediaFeatures(Protocol):
    """What makes model inputs of a row's media: `verl.utils.multimodal.MediaLoader`."""

    def features(self, multi_modal_data: dict[str, Any], /) -> dict[str, Tensor]:
        """Pixels and grids of a row's images and videos, under the names of `FEATURE_KEYS`."""
        ...


class PackedLine(NamedTuple):
    """One line of tokens of all rows."""

    input_ids: Tensor  # (N,)
    position_ids: Tensor  # (rows, N): one row, or four for M-RoPE
    cu_lengths: Tensor  # (B + 1,) int32

    def joined(self, input_ids: Tensor) -> "PackedLine":
        """With one more row of tokens at the end, counted from zero."""
        length = len(input_ids)
        positions = torch.arange(length, device=input_ids.device).expand(len(self.position_ids), -1)
        return PackedLine(
            torch.cat([self.input_ids, input_ids]),
            torch.cat([self.position_ids, positions], 1),
            torch.cat([self.cu_lengths, self.cu_lengths[-1:] + length]),
        )


class ModelInputs(NamedTuple):
    """A micro-batch as the model reads it."""

    arguments: dict[str, Any]  # of the model's packed forward
    positions: Tensor  # (B, T): the packed token of each place; meaningless on padding
    ends: Tensor  # (B,): the last packed token of each row


class PackedForward:
    """Runs micro-batches through a prepared model.

    A micro-batch of no rows is run for the sake of FSDP's collectives, see `micro_batches`. Every method
    reads `input_ids`, `attention_mask`, `position_ids`, and `multi_modal_data` if it is there.

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
    ) -> None:
        """Hold the model.

        Args:
            model: Prepared, possibly under FSDP.
            config: Its transformers config.
            media: Decodes the rows' media; None if rows hold text only.
            device: Where the model computes.
        """
        self.model, self.config, self.media, self.device = model, config, media, device
        self.model_type = model_type_of(config)

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
        rows = _rows_before(inputs, response_mask)
        head = None if reference is None else reference._head_logits(inputs, rows, temperature)

        def read(logits: DeferredLogits) -> TokenLogProbs:
            return logits.log_probs(
                targets,
                rows,
                temperature,
                with_entropy=with_entropy,
                with_sum_squares=with_sum_squares,
                reference=head,
            )

        result: TokenLogProbs = self._run(inputs, read)
        others = (None if part is None else unpack(part, response_mask) for part in result[1:])
        return TokenLogProbs(unpack(result.log_probs, response_mask), *others)

    def values(self, micro: DataProto) -> Tensor:
        """The score of the state before each response token: at the token before it.

        Args:
            micro: Reads `response_mask` too.

        Returns:
            (B, R) float32, zero where `response_mask` is zero.
        """
        response_mask = micro.batch["response_mask"].to(self.device)  # (B, R)
        inputs = self._inputs(micro)
        rows = _rows_before(inputs, response_mask)
        return unpack(self._run(inputs, lambda logits: logits.values(rows)), response_mask)

    def last_values(self, micro: DataProto) -> Tensor:
        """The score of each sequence, at its last attended token: (B,) float32."""
        inputs = self._inputs(micro)
        return self._run(inputs, lambda logits: logits.values(inputs.ends))

    @torch.no_grad()
    def _head_logits(self, inputs: ModelInputs, rows: Tensor, temperature: float) -> HeadLogits:
        return self._run(inputs, lambda logits: logits.head_logits(rows, temperature))

    def _run(self, inputs: ModelInputs, read: Callable[[DeferredLogits], Any]) -> Any:
        """What `read` makes of the logits inside the forward pass, where FSDP has the head at hand."""
        return self.model(**inputs.arguments, read=read)

    def _inputs(self, micro: DataProto) -> ModelInputs:
        """Pack the rows into a line, and decode their media."""
        mask = micro.batch["attention_mask"].to(self.device)
        packed = pack(micro.batch["input_ids"].to(self.device), mask)
        positions = self._packed_positions(micro.batch["position_ids"].to(self.device), mask)
        line = PackedLine(packed.values, positions, packed.cu_lengths)
        line, media = self._with_media(line, micro)
        positions = line.position_ids if len(line.position_ids) == 1 else line.position_ids[:, None]
        arguments = {
            "input_ids": line.input_ids[None],
            "position_ids": positions,
            "cu_seqlens": line.cu_lengths,
        }
        return ModelInputs(arguments | media, packed.positions, packed.cu_lengths[1:] - 1)

    def _packed_positions(self, positions: Tensor, mask: Tensor) -> Tensor:
        """(B, T) or (B, 4, T) to (rows, N)."""
        rows = self.model_type.position_rows
        if positions.ndim == 2:
            positions = positions[:, None].expand(-1, rows, -1)
        if positions.shape[1] != rows:
            raise ValueError(
                f"`position_ids` must have {rows} rows for {self.config.model_type}, got {positions.shape[1]}"
            )
        return positions.transpose(0, 1)[:, mask.bool()]

    def _with_media(self, line: PackedLine, micro: DataProto) -> tuple[PackedLine, dict[str, Any]]:
        """The rows' media, each distinct one once, and one more row where FSDP needs something to run."""
        rows = micro.non_tensor_batch.get("multi_modal_data", ())
        rows = [row for row in rows if row and any(row.values())]
        if rows:
            return line, self._features(rows)
        if self.model_type.media_owner is not None:
            dummy = dummy_row(self.config)
            media = {"pixel_values": dummy.pixel_values, "image_grid_thw": dummy.image_grid_thw}
            return line.joined(dummy.input_ids.to(self.device)), self._to_device(media)
        if not len(line.input_ids):
            return line.joined(line.input_ids.new_zeros(1)), {}
        return line, {}

    def _features(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Model inputs for the rows' media, and which of them each place in the tokens shows."""
        if self.model_type.media_owner is None or self.media is None:
            raise ValueError(f"rows hold media, which {self.config.model_type} is not known to read")
        order: dict[str, list[int]] = {"image_order": [], "video_order": []}
        counts = {"image_order": 0, "video_order": 0}
        first: dict[Any, dict[str, range]] = {}  # where a distinct row's media stand among all
        features: dict[str, list[Tensor]] = {}
        for row in rows:
            key = _media_key(row)
            if key not in first:
                values = self.media.features(row)
                first[key] = {}
                for name, grid in (("image_order", "image_grid_thw"), ("video_order", "video_grid_thw")):
                    number = len(values[grid]) if grid in values else 0
                    first[key][name] = range(counts[name], counts[name] + number)
                    counts[name] += number
                for name in FEATURE_KEYS:
                    if name in values:
                        features.setdefault(name, []).append(values[name])
            for name, places in first[key].items():
                order[name].extend(places)
        return self._to_device({name: torch.cat(values) for name, values in features.items()}) | order

    def _to_device(self, media: dict[str, Tensor]) -> dict[str, Any]:
        return {name: value.to(self.device) for name, value in media.items()}


def _rows_before(inputs: ModelInputs, response_mask: Tensor) -> Tensor:
    """The packed token before each response token, which predicts it."""
    return inputs.positions[:, -response_mask.shape[1] :][response_mask.bool()] - 1


def _media_key(row: dict[str, Any]) -> tuple:
    """What tells one row's media from another's: the references themselves."""
    return tuple(
        (kind, tuple(tuple(sorted(ref.items())) if isinstance(ref, dict) else ref for ref in refs))
        for kind, refs in sorted(row.items())
        if refs
    )
