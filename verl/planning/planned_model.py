# SPDX-License-Identifier: Apache-2.0
"""A model of a run and its passes, as the options give them."""

from dataclasses import dataclass

from verl.config.distillation import TEACHERS
from verl.config.model import FSDPConfig, MicroBatchSize, ModelConfig, OffloadConfig, OptimConfig, as_number
from verl.planning.memory_model import MicroBatch, ModelShape


@dataclass(frozen=True)
class RowLengths:
    """The longest rows of a run, in tokens."""

    prompt: int  # shared by the rows of a group
    response: int  # tokens whose log-probs are needed
    media: int  # tokens of a group that may be images and videos
    group: int = 1  # rows with the same prompt
    ranks: int = 1  # that share one row


@dataclass(frozen=True)
class PlannedPass:
    """A pass of a model over a rank's rows, in micro batches."""

    phase: str  # as in `timing_s/*`
    size: MicroBatchSize
    size_option: str
    rows: int  # of one rank, which micro batches divide
    dynamic: bool  # a micro batch is filled with tokens, up to those of `size` rows
    shares_prompt: bool  # a prompt runs once for its responses
    is_update: bool = False

    def largest_micro_batch(self, lengths: RowLengths, shape: ModelShape) -> MicroBatch:
        """A full micro batch of the longest rows."""
        prompt, response = lengths.prompt, lengths.response
        size = min(as_number(self.size), self.rows)
        group = min(lengths.group, self.rows) if self.shares_prompt else 1
        groups = -(-size // min(size, group))
        tokens, responses = groups * prompt + size * response, size * response
        if self.dynamic:
            tokens = min(size * (prompt + response), -(-self.rows // group) * prompt + self.rows * response)
            groups = -(-tokens // (prompt + group * response))
            responses = tokens * group * response // (prompt + group * response)
        else:
            tokens, responses = -(-tokens // lengths.ranks), -(-responses // lengths.ranks)
        media = 0 if shape.tower is None else groups * lengths.media
        patches = -(-media * shape.patches_per_token // lengths.ranks)  # each rank encodes a share
        return MicroBatch(tokens, responses, patches, min(media, tokens))


@dataclass(frozen=True)
class PlannedModel:
    """A model that each rank holds a shard of; without `optim` it is not trained."""

    role: str  # section of its options below `worker`; of a teacher its name
    model: ModelConfig
    fsdp: FSDPConfig
    offload: OffloadConfig
    passes: tuple[PlannedPass, ...]
    optim: OptimConfig | None = None
    head: str = "causal"  # or "scalar"
    router_replay: str = "off"
    is_teacher: bool = False
    prompt: int | None = None  # tokens of its longest prompts, if they are not the policy's
    share: float = 1.0  # of a step's rows that it is expected to read

    @property
    def section(self) -> str:
        """Section of its options, such as `fsdp`."""
        return f"{TEACHERS}.{self.role}" if self.is_teacher else f"worker.{self.role}"

    @property
    def has_rules_of_layers(self) -> bool:
        """True if an option names layers or divides them, which not every model allows."""
        factors = self.optim is not None and bool(self.optim.lr_factors)
        sizes = self.fsdp.tensor_parallel_size, self.fsdp.expert_parallel_size
        return factors or self.router_replay != "off" or max(sizes) > 1

    @property
    def option(self) -> str:
        """Section of the option `model_path`."""
        return self.section if self.is_teacher else f"{self.section}.model"
