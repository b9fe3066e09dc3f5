# SPDX-License-Identifier: Apache-2.0
"""Inputs of the memory plan: a run's models, their passes, its rows and its rollout engine.

`planned_ppo` and `planned_sft` describe the two kinds of runs; everything else treats them alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from verl.config.distillation import DistillationConfig
from verl.config.files.fp8_files import is_in_fp8
from verl.config.model import AUTO, ModelConfig, PolicyConfig, TrainedModelConfig
from verl.config.ppo import PPOConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.rollout import RolloutConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import RunConfig, RunTree
from verl.config.worker import WorkerConfig
from verl.distributed.backends import on_gpu
from verl.planning.diffusion.planned import PlannedPictures, planned_pictures
from verl.planning.machine import Machine, Parts
from verl.planning.memory_model import NUMBER_BYTES, ModelSetup, ModelShape
from verl.planning.planned_model import PlannedModel, PlannedPass, RowLengths
from verl.planning.step_needs import StepNeeds

C = TypeVar("C", bound=RunTree)

LOG_PROB_PHASES = {"actor": "old", "critic": "values", "prime": "process_rewards"}  # by trained role
SFT_BATCH_TENSORS = 5  # of int64: ids, mask, positions, responses and response mask
ACTIVATION_BYTES = 2 << 30  # of an engine, in addition to weights and cache
QUANTIZED_BYTES = 1  # of a weight in fp8; its scales are one in thousands
SLICE_BYTES = 1 << 30  # of experts that are gathered for vLLM, see `distributed/weights/gathering.py`
JOINED_WEIGHTS = 2  # gate and up, of which vLLM makes one
TEACHER = "teacher"  # phase


@dataclass(frozen=True)
class PlannedEngine:
    """A rollout engine."""

    options: RolloutConfig
    prompts: int  # that one engine gets in a call
    max_prompt_length: int
    max_sequence_length: int
    max_model_len: int
    own: int = 0  # engines in processes of their own; 0: all are in the processes that train
    samples_ahead: bool = False  # while the models train

    @property
    def number(self) -> int:
        """Bytes of a weight, and of a number in the cache."""
        return NUMBER_BYTES[self.options.dtype]

    @property
    def is_quantized(self) -> bool:
        return self.options.quantization is not None

    def weights(self, policy: ModelShape) -> int:
        """Bytes of the weights on each of its devices; embeddings and head are never quantized."""
        size = self.number * policy.params
        if self.is_quantized:
            size = self.number * policy.root + QUANTIZED_BYTES * (policy.params - policy.root)
        return size // self.options.tensor_parallel_size

    def share(self, policy: ModelShape, machine: Machine) -> dict[str, Any]:
        """Return the fields of a `Phase` by which a share of a GPU must hold what the engine needs.

        It refuses to start if no sequence of the model's length fits into the cache.
        """
        if not on_gpu(machine.device) or self.options.name == "hf":
            return {}
        ranks, size = self.options.tensor_parallel_size, self.max_model_len
        needed = {
            "engine's weights": self.weights(policy),
            "its activations": ACTIVATION_BYTES,
            "cache of a sequence": int(policy.text.cached(self.number, size, ranks)),
        }
        return {
            "engine": needed,
            "engine_share": int(self.options.gpu_memory_utilization * machine.device_bytes),
        }

    def cpu_cache(self, policy: ModelShape) -> int:
        """Keys and values on CPU: vLLM's cache, or those of the prompts that `hf` runs together."""
        token = self.number * policy.text.keys_and_values
        if self.options.name == "hf":
            prompts = max(1, self.options.max_num_batched_tokens // self.max_prompt_length)
            return min(prompts, self.prompts) * self.options.n * self.max_sequence_length * token
        return self.options.cpu_cache_bytes(token, self.max_model_len)

    def sampling(
        self, policy: ModelShape, setup: ModelSetup, machine: Machine, *, sends_adapters: bool
    ) -> Parts:
        """Memory in addition to the models while it samples and while it receives their weights."""
        largest = policy.trained if sends_adapters else policy.largest_stored * policy.params // policy.stored
        in_slices = self._takes_stacks(policy) and not sends_adapters
        parts = {"a gathered weight": self._gathered(policy, setup, self.number * largest, in_slices)}
        if self.is_quantized:  # what waits until all of a layer is there, and the layer until it is quantized
            layer = policy.text.experts or JOINED_WEIGHTS * largest
            parts["a layer to quantize"] = self.number * (layer + layer // self.options.tensor_parallel_size)
        if on_gpu(machine.device):
            parts["engine"] = int(self.options.gpu_memory_utilization * machine.device_bytes)
            if (
                self.options.name != "hf"
            ):  # float32, made after the engine measured what is left for its cache
                parts["logits"] = 4 * self.options.sequences_at_once(on_gpu=True) * policy.vocab
        elif self.options.name == "hf":
            parts["weights in exchange"] = self.weights(policy)
        return parts

    def _takes_stacks(self, policy: ModelShape) -> bool:
        """Return whether experts are gathered in slices: adapters on them are folded into whole ones."""
        is_plain = not policy.has_expert_biases and not policy.text.adapted_experts
        return self.options.name == "vllm" and policy.experts > 0 and is_plain

    def _gathered(self, policy: ModelShape, setup: ModelSetup, largest: int, in_slices: bool) -> int:
        """Memory to gather a weight of `largest` bytes, or experts of as many in slices."""
        # Its shard in the engine's type, what all ranks sent, and the whole weight that is made of it.
        ranks = setup.ranks * setup.layer_ranks
        copies = 1 if ranks == 1 else 2 + 1 / ranks
        if setup.ranks > 1 and setup.layer_ranks > 1:  # the part of the ranks that share layers comes first
            copies += 1 / setup.layer_ranks
        if in_slices and largest > SLICE_BYTES:
            # This slice, the one before, and a part of one rank's experts.
            part = min(SLICE_BYTES, largest // setup.expert_ranks) if setup.expert_ranks > 1 else 0
            return max(2 * SLICE_BYTES + part, int(copies * self.number * policy.head))
        if policy.experts and setup.ranks > 1 and not in_slices:
            copies += 0.5  # the last weight that the engine was given is half as large
        if setup.expert_ranks > 1:  # the part of one rank's experts comes first
            copies += 1 / setup.expert_ranks
        return int(copies * largest)


@dataclass(frozen=True, eq=False)
class PlannedServer:
    """A model that the run serves for the reward function."""

    option: str  # its section
    options: RewardServerConfig

    @property
    def model(self) -> ModelConfig:
        options = self.options
        return ModelConfig(model_path=options.model_path, trust_remote_code=options.trust_remote_code)

    def weights(self, shape: ModelShape) -> int:
        """Bytes of the weights on each of its devices."""
        return NUMBER_BYTES[self.options.dtype] * shape.params // self.options.tensor_parallel_size

    def awake(self, shape: ModelShape, machine: Machine) -> int:
        """Bytes of its engine on each GPU while it answers."""
        return max(int(self.options.gpu_memory_utilization * machine.device_bytes), self.weights(shape))


@dataclass(frozen=True)
class PlannedRun:
    """Everything that the memory of a run depends on, except the sizes of its models."""

    trainer: RunConfig
    lengths: RowLengths
    models: tuple[PlannedModel, ...]  # in the order in which they are loaded, the policy first
    batch_bytes: int  # tensors of a step
    engine: PlannedEngine | None = None
    rows: int = 0  # of a rank in a step
    epochs: Mapping[str, int] = field(default_factory=dict)  # over them, by trained role
    ring: int = 1  # ranks of a ring, of all that share a row
    reference: bool = False  # the KL term needs one; with adapters it is the policy without them
    servers: tuple[PlannedServer, ...] = ()
    pictures: PlannedPictures | None = None  # of a diffusion run, which has no other models
    batch_tokens: int = 0  # of a step's rows, as long as they may be
    compares_teachers: bool = False  # they run in the update, with the policy
    attention_kernel: str = "auto"  # the option

    @property
    def shared_engine(self) -> PlannedEngine | None:
        """The engine in each process that trains."""
        return None if self.engine is None or self.engine.own else self.engine

    def row_groups(self, world_size: int) -> int:
        """Return the groups of ranks that have different rows."""
        return world_size // (self.lengths.ranks * self.planned_models[0].fsdp.tensor_parallel_size)

    @property
    def passes(self) -> list[PlannedPass]:
        return [each for model in self.planned_models for each in model.passes]

    @property
    def planned_models(self) -> tuple[PlannedModel, ...]:
        """All models, those of pictures too."""
        return self.models if self.pictures is None else (self.pictures.model, *self.models)

    def serves_adapters(self, device: str) -> bool:
        """True if the engine gets LoRA weights as an adapter, as far as the options show."""
        return (
            on_gpu(device)
            and self.engine is not None
            and self.engine.options.name == "vllm"
            and self.engine.options.lora_sync != "merged"
            and not self.engine.is_quantized
            and self.models[0].model.lora.is_used
            and not is_in_fp8(self.models[0].model.model_path or "")
        )

    def auto_options(self) -> list[str]:
        """The micro batch sizes that are `auto`."""
        return list(dict.fromkeys(each.size_option for each in self.passes if each.size == AUTO))

    def sizes(self, option: str) -> list[int]:
        """Micro batch sizes that divide the rows of a pass, the largest first."""
        rows = next(each.rows for each in self.passes if each.size_option == option)
        return [size for size in range(rows, 0, -1) if rows % size == 0]

    def roles(self, *, trained_only: bool = False) -> list[str]:
        """Return the sections of the models' options below `worker`."""
        models = self.planned_models
        own = [model for model in models if not model.is_teacher]
        return list(dict.fromkeys(model.role for model in own if model.optim or not trained_only))


def planned_ppo(config: PPOConfig) -> PlannedRun:
    data, rollout, length = config.data, config.worker.rollout, config.max_sequence_length
    prompt, response = data.max_prompt_length, data.max_response_length
    sequences = data.rollout_batch_size * rollout.n
    # Three tensors of int64 over sequences, eight of float32 over responses.
    batch_bytes = sequences * (8 * 3 * length + 4 * 8 * response)
    roles, use_reference = config.trained_roles, config.algorithm.use_reference
    skipped = () if StepNeeds.of(config).old_pass else ("old",)
    models = _ppo_models(config.worker, roles, sequences, config.dp_size, use_reference, skipped)
    distillation, actor, rows = config.distillation, config.worker.actor, sequences // config.dp_size
    mini_batch = actor.global_batch_size * rollout.n // config.dp_size
    teachers = planned_teachers(distillation, actor, rows, mini_batch, shares=actor.share_prompt)
    served = ((name, server) for name, server in config.reward_servers.items() if server.is_served)
    servers = (PlannedServer(f"reward_servers.{name}", server) for name, server in served)
    pictures = None
    if config.trainer.diffusion:
        pictures = planned_pictures(data, config.worker, config.dp_size, reference=use_reference)
    return PlannedRun(
        config.trainer,
        RowLengths(prompt, response, media=prompt, group=rollout.n, ranks=config.worker.actor.sp_size),
        () if pictures else (*models, *teachers),  # formulas are of language models
        batch_bytes,
        PlannedEngine(
            rollout,
            config.loader_batch_size // config.num_engines,
            prompt,
            length,
            config.max_model_len,
            own=0 if config.worker.hybrid_engine else config.num_engines,
            samples_ahead=config.trainer.async_training.samples_ahead,
        ),
        rows,
        {role: getattr(section, "ppo_epochs", 1) for role, section in roles.items()},
        config.worker.actor.ring_size,
        use_reference,
        tuple(servers),
        pictures,
        batch_tokens=sequences * length,
        compares_teachers=distillation.compares_in_update,
        attention_kernel=actor.attention_kernel,
    )


def planned_teachers(
    distillation: DistillationConfig, actor: PolicyConfig, rows: int, mini_batch: int, *, shares: bool = False
) -> Iterator[PlannedModel]:
    """Yield the teachers, which run in the micro batches of the update if the loss compares distributions.

    `rows` are those of a rank in a step, `mini_batch` those in an update.
    """
    for name, teacher in distillation.loaded.items():
        is_before = distillation.reads_teacher_log_probs
        each = _pass(TEACHER, "actor", actor, rows if is_before else mini_batch, shares, not is_before)
        yield PlannedModel(
            name,
            teacher.model,
            teacher.fsdp,
            teacher.offload,
            (replace(each, is_update=False),),
            is_teacher=True,
            prompt=teacher.max_prompt_length,
            share=1 / len(distillation.teachers),  # each row has one
        )


def planned_sft(config: SFTConfig) -> PlannedRun:
    # Every token of a row may be trained on, and may be media.
    actor, length = config.worker.actor, config.data.max_length
    rows = actor.global_batch_size // config.dp_size
    passes = (_pass("update_actor", "actor", actor, rows, is_update=True),)
    teachers = planned_teachers(config.distillation, actor, rows, rows)
    if config.data.val_files:
        passes = (_pass("validation", "actor", actor, rows), *passes)
    return PlannedRun(
        config.trainer,
        RowLengths(prompt=0, response=length, media=length, ranks=actor.sp_size),
        (PlannedModel("actor", actor.model, actor.fsdp, actor.offload, passes, actor.optim), *teachers),
        batch_bytes=8 * SFT_BATCH_TENSORS * actor.global_batch_size * length,
        rows=rows,
        ring=actor.ring_size,
        compares_teachers=config.distillation.compares_in_update,
        attention_kernel=actor.attention_kernel,
    )


def _ppo_models(
    worker: WorkerConfig,
    roles: dict[str, TrainedModelConfig],
    sequences: int,
    dp_size: int,
    has_ref: bool,
    skipped: tuple[str, ...],  # phases
) -> Iterator[PlannedModel]:
    actor, ref, rows, shares = worker.actor, worker.ref, sequences // dp_size, worker.actor.share_prompt
    for role, section in roles.items():
        model = section.model if section.model.model_path is not None else actor.model  # prime may have none
        mini_batch = section.global_batch_size * worker.rollout.n // dp_size
        log_probs = _pass(LOG_PROB_PHASES[role], role, section, rows, shares)
        update = _pass(f"update_{role}", role, section, mini_batch, shares, is_update=True)
        passes = tuple(each for each in (log_probs, update) if each.phase not in skipped)
        head = "scalar" if role == "critic" else "causal"
        replay = actor.router_replay if role == "actor" else "off"
        yield PlannedModel(role, model, section.fsdp, section.offload, passes, section.optim, head, replay)
        if model.lora.is_used:
            continue  # its reference is the same model without adapters
        if role == "actor" and has_ref:
            passes = (_pass("ref", role, section, rows, shares),)
            yield PlannedModel("ref", model, ref.fsdp, ref.offload, passes)
        if role == "prime":
            passes = (_pass("prime_ref", role, section, rows, shares),)
            yield PlannedModel(role, model, section.fsdp, section.offload, passes)
    if worker.reward_model.is_used:
        scorer, role, option = worker.reward_model, "reward_model", "micro_batch_size_per_device"
        size = scorer.micro_batch_size_per_device
        scores = PlannedPass(role, size, f"worker.{role}.{option}", rows, dynamic=True, shares_prompt=False)
        yield PlannedModel(role, scorer.model, scorer.fsdp, scorer.offload, (scores,), head="scalar")


def _pass(
    phase: str,
    role: str,
    section: TrainedModelConfig,
    rows: int,
    shares: bool = False,
    is_update: bool = False,
) -> PlannedPass:
    option = f"micro_batch_size_per_device_for_{'update' if is_update else 'experience'}"
    size, dynamic = getattr(section, option), section.dynamic_batching
    return PlannedPass(phase, size, f"worker.{role}.{option}", rows, dynamic, shares, is_update)


def with_options(config: C, changes: Mapping[str, Any]) -> C:
    """Return a copy of a config with some options replaced."""
    for key, value in changes.items():
        config = _with_option(config, key, value)
    return config


def _with_option(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    if isinstance(section, dict):  # of sections that the user named
        return section | {name: _with_option(section[name], rest, value)}
    inner = _with_option(getattr(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})
