# SPDX-License-Identifier: Apache-2.0
"""What the memory of a run follows from, read off its options; the sizes of the models come beside it.

`ppo.py` and `sft.py` describe their runs in these words, and nothing behind them knows which
kind it is.
"""

from dataclasses import dataclass

from verl.config.model import (
    AUTO,
    FSDPConfig,
    MicroBatchSize,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    TrainedModelConfig,
    as_number,
)
from verl.config.trainer import RunConfig
from verl.planning.memory_model import Line, ModelShape
from verl.planning.planned_engine import PlannedEngine

EXPERIENCE = "micro_batch_size_per_device_for_experience"
UPDATE = "micro_batch_size_per_device_for_update"


@dataclass(frozen=True)
class RowLengths:
    """The longest rows of a run, in tokens.

    Attributes:
        prompt: That the rows of a group share.
        response: Of each row, whose log-probs are wanted.
        media: Of a group, those that may stand for images and videos.
        group: Rows with the same prompt.
        ranks: That share one row.
    """

    prompt: int
    response: int
    media: int
    group: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class PlannedPass:
    """A pass of a model over a rank's rows, in micro batches.

    Attributes:
        phase: Its name, as in `timing_s/*`.
        size: Rows of a micro batch.
        size_option: The option that says so.
        rows: Of one rank, that are divided into micro batches.
        dynamic: A line is filled by tokens, up to those of `size` rows.
        shares: A prompt runs once for its responses.
        is_update: It has a backward pass and an optimizer step.
    """

    phase: str
    size: MicroBatchSize
    size_option: str
    rows: int
    dynamic: bool
    shares: bool
    is_update: bool = False

    def longest_line(self, lengths: RowLengths, shape: ModelShape) -> Line:
        """A full micro batch of the longest rows.

        Args:
            lengths: Of the rows.
            shape: Of the model.
        """
        prompt, response = lengths.prompt, lengths.response
        size, group = (
            min(as_number(self.size), self.rows),
            min(lengths.group, self.rows) if self.shares else 1,
        )
        together = min(size, group)
        groups = -(-size // together)
        tokens, responses = groups * prompt + size * response, size * response
        if self.dynamic:
            tokens = min(size * (prompt + response), -(-self.rows // group) * prompt + self.rows * response)
            groups = -(-tokens // (prompt + group * response))
            responses = tokens * group * response // (prompt + group * response)
        else:
            tokens, responses = -(-tokens // lengths.ranks), -(-responses // lengths.ranks)
        patches = 0 if shape.tower is None else groups * lengths.media * shape.merge
        return Line(tokens, responses, patches)


@dataclass(frozen=True)
class PlannedModel:
    """A model that each rank holds a shard of; without `optim` it is not trained.

    Attributes:
        role: Section of its options below `worker`.
        model, fsdp, offload, optim: Those options.
        passes: What it computes.
        head: "causal" or "scalar".
    """

    role: str
    model: ModelConfig
    fsdp: FSDPConfig
    offload: OffloadConfig
    passes: tuple[PlannedPass, ...]
    optim: OptimConfig | None = None
    head: str = "causal"


@dataclass(frozen=True)
class PlannedRun:
    """What the memory of a run follows from.

    Attributes:
        trainer: Its processes, and how it saves.
        lengths: Of its rows.
        models: In the order in which they are loaded, the policy first.
        batch_bytes: Of the tensors of a step.
        engine: That samples; None where nothing is sampled.
    """

    trainer: RunConfig
    lengths: RowLengths
    models: tuple[PlannedModel, ...]
    batch_bytes: int
    engine: PlannedEngine | None = None

    @property
    def passes(self) -> list[PlannedPass]:
        """Those of all models."""
        return [one for model in self.models for one in model.passes]

    def unset_sizes(self) -> list[str]:
        """The options that say `auto`."""
        return list(dict.fromkeys(one.size_option for one in self.passes if one.size == AUTO))

    def sizes(self, option: str) -> list[int]:
        """Micro batch sizes that divide the rows which an option cuts, the largest first."""
        rows = next(one.rows for one in self.passes if one.size_option == option)
        return [size for size in range(rows, 0, -1) if rows % size == 0]

    def roles(self, *, trained_only: bool = False) -> list[str]:
        """The sections of its models."""
        return list(dict.fromkeys(one.role for one in self.models if one.optim or not trained_only))


def experience_pass(
    phase: str, section: TrainedModelConfig, owner: str, rows: int, *, shares: bool = False
) -> PlannedPass:
    """A pass without gradients in the micro batches of a section.

    Args:
        phase: Its name.
        section: With the size of a micro batch.
        owner: Name of the section below `worker`.
        rows: Of one rank.
        shares: A prompt runs once for its responses.
    """
    option = f"worker.{owner}.{EXPERIENCE}"
    size = section.micro_batch_size_per_device_for_experience
    return PlannedPass(phase, size, option, rows, section.dynamic_batching, shares)


def update_pass(section: TrainedModelConfig, owner: str, rows: int, *, shares: bool = False) -> PlannedPass:
    """The update of a model, with the arguments of `experience_pass`; `rows` are those of a mini batch."""
    option = f"worker.{owner}.{UPDATE}"
    size = section.micro_batch_size_per_device_for_update
    return PlannedPass(
        f"update_{owner}", size, option, rows, section.dynamic_batching, shares, is_update=True
    )
