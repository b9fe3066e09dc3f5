# SPDX-License-Identifier: Apache-2.0
"""One rank of a diffusion run on a virtual GPU: the project's worker, as it is, and diffusers' models.

Not the project's own: no weights are read from files, prompts are split by the tokenizers of a tiny model,
and pictures are black once they are decoded.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.virtual.device import TYPE
from tests.virtual.shapes import PictureSetup

Phase = Callable[[str], AbstractContextManager[None]]

aten: Any = torch.ops.aten


def build_pipeline(folder: Path, dtype: torch.dtype, computes_in: torch.dtype) -> Any:
    """Build a pipeline without values, as `open_pipeline` does: its transformer is on the meta device."""
    import diffusers

    from examples.quickstart import tiny_pipelines
    from verl.diffusion.stored_parts import replace_tensors
    from verl.planning.diffusion.shapes import TRANSFORMER, VAE, index_of, meta_part, model_names

    index, dtypes = index_of(folder), {TRANSFORMER: dtype, VAE: torch.float32}
    parts = {name: meta_part(folder, name).to(dtypes.get(name, computes_in)) for name in model_names(folder)}
    for name, part in parts.items():
        if name != TRANSFORMER:
            replace_tensors(part, lambda _, tensor: torch.empty_like(tensor, device="cpu"))
    clip, t5 = tiny_pipelines.clip_tokenizer(), tiny_pipelines.t5_tokenizer()
    clip.model_max_length = 77
    for name in [name for name in parts if name.startswith("text_encoder")]:
        is_clip = index[name][1].startswith("CLIP")
        parts[name.replace("text_encoder", "tokenizer")] = clip if is_clip else t5
    scheduler = getattr(diffusers, index["scheduler"][1]).from_pretrained(folder / "scheduler")
    return getattr(diffusers, index["_class_name"])(**parts, scheduler=scheduler)


def build_part(folder: Path, dtype: torch.dtype) -> Any:
    """Build a model of a pipeline with its weights in host memory, as `stored_part` does."""
    from verl.planning.diffusion.shapes import meta_part

    return meta_part(folder.parent, folder.name).to(dtype).to_empty(device="cpu")


def substitute_pictures(phase: Phase) -> None:
    """Replace what needs files and values; sampling's parts that are phases of their own are measured so."""
    from verl.diffusion import model
    from verl.diffusion.model import DiffusionModel
    from verl.diffusion.prompts import PromptEncoder

    decode, encode = DiffusionModel.decode, PromptEncoder._encode

    def decode_to_black(self: Any, latents: Tensor) -> Tensor:
        with phase("decode"):
            return torch.zeros(decode(self, latents).shape)

    def encode_as_phase(self: Any, texts: Sequence[str]) -> None:
        with phase("encode"):
            encode(self, texts)

    model.open_pipeline, model.stored_part = build_pipeline, build_part
    DiffusionModel.decode, PromptEncoder._encode = decode_to_black, encode_as_phase
    F.scaled_dot_product_attention = attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Attend with the kernels that torch takes on a GPU: flash, and the memory-efficient one for masks."""
    if query.device.type != TYPE:
        raise AssertionError(f"attention runs on the device, not on {query.device}")
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]  # fmt: skip
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2]).to(query.dtype)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, False, dropout_p, is_causal, scale=scale
    )[0]  # fmt: skip


def build_picture_worker(folder: Path, setup: PictureSetup, ranks: int) -> Any:
    """Make the worker as its process does, but for the process group, which exists."""
    import torch.distributed as dist

    from verl.diffusion.worker import DiffusionWorker

    dist.init_process_group = lambda backend: None  # of the worker: `start_processes` was first
    return DiffusionWorker(picture_config(folder, setup, ranks), _run_options(setup))


def picture_config(folder: Path, setup: PictureSetup, ranks: int) -> Any:
    """Return the section `worker` of a run."""
    from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OffloadConfig, OptimConfig
    from verl.config.rollout import RolloutConfig
    from verl.config.worker import ActorConfig, WorkerConfig

    model = ModelConfig(
        model_path=str(folder), lora=LoraConfig(rank=setup.lora_rank, alpha=2 * setup.lora_rank),
        enable_gradient_checkpointing=setup.checkpointing,
    )  # fmt: skip
    actor = ActorConfig(
        model=model,
        fsdp=FSDPConfig(torch_dtype=setup.dtype),
        offload=OffloadConfig(setup.offload, setup.offload),
        optim=OptimConfig(strategy=setup.optimizer),
        global_batch_size=setup.prompts * ranks,
        micro_batch_size_per_device_for_update=setup.rows_at_once,
        micro_batch_size_per_device_for_experience=setup.at_once,
        dynamic_batching=False,
    )
    rollout = RolloutConfig(
        n=setup.responses, tensor_parallel_size=1, num_steps=setup.steps, guidance_scale=setup.guidance,
        resolution=setup.size[0], height=setup.size[0], width=setup.size[1], num_frames=setup.frames,
    )  # fmt: skip
    return WorkerConfig(actor=actor, rollout=rollout)


def _run_options(setup: PictureSetup) -> Any:
    from verl.config.algorithm import RolloutCorrectionConfig
    from verl.data.media.cache import MediaCache
    from verl.data.media.sizes import MediaOptions
    from verl.workers.roles.actor import KLLoss
    from verl.workers.run_options import RunOptions

    return RunOptions(
        device=TYPE, training_steps=10, media=MediaOptions(1, 1), media_cache=MediaCache(None),
        override_chat_template=None, seed=0,
        max_sequence_length=setup.prompt_length + setup.steps, max_response_length=setup.steps,
        use_reference=setup.reference, use_critic=False, use_prime=False,
        kl_loss=KLLoss("full", 1e-2) if setup.reference else None,
        has_full_kl_in_rewards=False, has_sum_squares=False, rollout_correction=RolloutCorrectionConfig(),
        accuracy_key="accuracy",
    )  # fmt: skip


def run_picture_phases(worker: Any, setup: PictureSetup, phase: Phase) -> None:
    """Do one step's work of a rank, in the trainer's order; the old log-probs are those of sampling."""
    from verl.workers.rollout.interface import SamplingOptions

    rows = setup.prompts * setup.responses
    with phase("gen"):
        pictures = [
            picture
            for found in worker.generate(_prompts(setup), SamplingOptions(n=setup.responses))
            for picture in found
        ]
    assert len(pictures) == rows
    batch = _trajectories(worker, setup)
    for _ in range(setup.updates):
        with phase("update_actor"):
            worker.update_actor(batch, 0.0, 0)


def _prompts(setup: PictureSetup) -> Any:
    from verl.protocol import DataProto

    names = [f"a red wall {number}" for number in range(setup.prompts)]
    return DataProto.from_dict({}, {"uid": names, "prompt_text": names})


def _trajectories(worker: Any, setup: PictureSetup) -> Any:
    """Rows in host memory as the trainer joins them: steps are responses."""
    from verl.protocol import DataProto

    rows, steps = setup.prompts * setup.responses, setup.steps
    names = [f"a red wall {row // setup.responses}" for row in range(rows)]
    mask = torch.ones(rows, steps, dtype=torch.int64)
    mask[:, -1] = 0  # the last step draws no noise
    numbers = torch.arange(steps).expand(rows, -1).contiguous()
    zeros = torch.zeros(rows, steps)
    tensors = {
        "latents": torch.zeros(rows, steps + 1, *worker.engine.shape),
        "input_ids": numbers, "attention_mask": torch.ones_like(mask), "responses": numbers,
        "response_mask": torch.ones_like(mask), "loss_mask": mask,
        "old_log_probs": zeros, "advantages": zeros, "returns": zeros,
    }  # fmt: skip
    return DataProto.from_dict(tensors, {"uid": names, "prompt_text": names})
