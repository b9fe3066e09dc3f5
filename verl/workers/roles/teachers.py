# SPDX-License-Identifier: Apache-2.0
"""Frozen teachers of the policy, each for its own rows, on one data-parallel rank."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.kl import kl_divergence, top_kl
from verl.batch_keys import (
    TEACHER_IDS,
    TEACHER_KEYS,
    TEACHER_LOG_PROBS,
    TEACHER_MEDIA,
    TEACHER_PROMPTS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
)
from verl.config.distillation import TEACHERS, DistillationLossConfig
from verl.config.model import TrainedModelConfig
from verl.models.families.mrope import continue_positions
from verl.models.fused_log_probs import TokenLogProbs, linear_kl
from verl.models.head.logit_chunks import HeadLogits
from verl.models.head.top_tokens import (
    Distributions,
    Divergence,
    TokenTargets,
    TopTokens,
    linear_top_log_probs,
    top_tokens,
)
from verl.protocol import DataProto
from verl.workers.packing.forward import PackedForward
from verl.workers.packing.media_inputs import WholeRows
from verl.workers.roles.loss_terms import LossTerm, Tensors, TokenLoss
from verl.workers.roles.updater import compute_experience


class Teachers:
    """The teachers of a run, in the order of `distillation.teacher_models`.

    All ranks run each teacher as often, those without rows for it as well: FSDP's collectives need all.
    """

    def __init__(
        self,
        forwards: Mapping[str, PackedForward | None],  # None: behind a server, whose answers are columns
        loss: DistillationLossConfig,
        device: torch.device | str = "cpu",  # the policy's
    ) -> None:
        self.forwards, self.names, self.loss, self.device = forwards, list(forwards), loss, device

    @property
    def runs_in_update(self) -> bool:
        """True if the loss compares whole distributions."""
        return not self.loss.reads_sampled_tokens

    def divergence(self, micro: DataProto, temperature: float) -> Divergence | None:
        """Run the teachers on a micro batch, each on its rows; None if the loss reads log-probs only."""
        if not self.runs_in_update:
            return None
        rows, _ = micro.batch["loss_mask"].nonzero(as_tuple=True)  # (M,): the row of each token
        targets = []
        for number, (name, forward) in enumerate(self.forwards.items()):
            is_own = self._is_own(micro, number)
            own = micro[is_own.nonzero()[:, 0]]
            given = (
                self._answered(own)
                if forward is None
                else forward.head_logits(seen_by_teachers(own), temperature)
            )
            targets.append(TokenTargets(is_own[rows].nonzero()[:, 0], given, name))
        return Divergence(targets, self._compare)

    def loss_term(self) -> LossTerm:
        """Return the term of the loss that pulls a policy towards its teachers."""
        needs = ["divergence"] if self.runs_in_update else []
        return LossTerm("distillation/loss", self.loss.distillation_loss_coef, self._token_loss, needs)

    def _token_loss(self, student: TokenLogProbs, tensors: Tensors) -> TokenLoss:
        # the divergence of each token from its teacher; also logged for each of several teachers
        mask, per_token = tensors["loss_mask"], student.divergence
        if per_token is None:
            teacher = tensors[TEACHER_LOG_PROBS]
            per_token = kl_divergence(student.log_probs, teacher, mask, self.loss.loss_mode)
        means = {"distillation/kl": (per_token, mask)}
        if len(self.names) > 1:
            for number, name in enumerate(self.names):
                own = (tensors[TEACHER_IDS] == number)[:, None]
                means[f"distillation/kl/{name}"] = per_token, mask * own
        return TokenLoss(per_token, means)

    def compute_log_probs(
        self, name: str, config: TrainedModelConfig, batch: DataProto, temperature: float
    ) -> Tensor:
        """Compute a teacher's log-probs of the tokens of its rows: (B, R) float32 on CPU, else zero.

        Collective over all ranks; `config` has the sizes of micro batches.
        """
        number, forward = self.names.index(name), self.forwards[name]
        assert forward is not None, "nothing loads a teacher behind a server"

        def log_probs(micro: DataProto) -> Tensor:
            own = self._is_own(micro, number).nonzero()[:, 0]
            found = forward.log_probs(seen_by_teachers(micro[own]), temperature).log_probs
            zeros = torch.zeros(micro.batch["loss_mask"].shape, device=found.device)
            return zeros.index_copy(0, own.to(found.device), found)

        return compute_experience(config, forward, batch, log_probs, (*TEACHER_KEYS, TEACHER_MEDIA))

    def _is_own(self, batch: DataProto, number: int) -> Tensor:
        # (B,) bool
        if len(self.names) == 1:
            return torch.ones(len(batch), dtype=torch.bool)
        return batch.batch[TEACHER_IDS] == number

    def _answered(self, micro: DataProto) -> TopTokens:
        """Return a server's answers about the tokens of `loss_mask`."""
        tensors = micro.batch
        mask = tensors["loss_mask"].bool()
        top = tensors[TEACHER_TOP_LOG_PROBS][mask]  # (K, Z)
        top = torch.cat([top, log_of_others(top)], -1)
        return TopTokens(tensors[TEACHER_TOP_IDS][mask].long().to(self.device), top.to(self.device))

    def _compare(self, policy: HeadLogits, teacher: Distributions, name: str) -> Tensor:
        is_forward = self.loss.is_forward
        if isinstance(teacher, HeadLogits):
            # vocabularies of models with one tokenizer differ in unused entries at the end
            size = min(len(policy.weight), len(teacher.weight))
            policy, teacher = policy.of_vocabulary(size), teacher.of_vocabulary(size)
            if self.loss.is_exact:
                return linear_kl(policy, teacher, is_forward=is_forward)
            teacher = top_tokens(teacher, self.loss.topk)
        assert isinstance(teacher, TopTokens), "there are two kinds"
        check_vocabulary(name, teacher.ids, len(policy.weight))
        return top_kl(linear_top_log_probs(policy, teacher.ids), teacher.log_probs, is_forward=is_forward)


def log_of_others(top: Tensor) -> Tensor:
    """Return the log-probability of all tokens but the `top` (..., Z): (..., 1).

    It is at least that of one rounding of 1 in float32, below which a server's numbers do not tell it.
    """
    others = 1 - top.double().exp().sum(-1, keepdim=True)
    return others.clamp_min(torch.finfo(torch.float32).eps).log().to(top.dtype)


def check_vocabulary(name: str, ids: Tensor, size: int) -> None:
    """Raise a ValueError if a teacher named a token that the policy does not have."""
    if ids.numel() and (largest := int(ids.max())) >= size:
        raise ValueError(
            f"the teacher `{name}` finds token {largest} likely, and the policy's vocabulary has {size}:"
            f" lower `distillation.distillation_loss.topk`, or load it with `{TEACHERS}.{name}.model_path`"
        )


def seen_by_teachers(micro: DataProto) -> DataProto:
    """Replace the prompts and media by the teachers' views of them; the responses stay."""
    tensors = micro.batch
    if TEACHER_PROMPTS[0] not in tensors:
        return micro
    prompts, mask, positions = (tensors[name] for name in TEACHER_PROMPTS)
    width = tensors["responses"].shape[1]
    replaced = {
        "input_ids": torch.cat([prompts, tensors["responses"]], -1),  # (B, Q + R)
        "attention_mask": torch.cat([mask, tensors["attention_mask"][:, -width:]], -1),
        "position_ids": torch.cat([positions, continue_positions(positions[..., -1], width)], -1),
        "multi_modal_data": micro.non_tensor_batch[TEACHER_MEDIA],
    }
    seen = micro.merge(replaced, replace=list(replaced))
    whole = WholeRows.of(micro)  # other ranks' media are the policy's
    return seen if whole is None else WholeRows(None).attach_to(seen)
