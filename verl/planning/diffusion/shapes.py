# SPDX-License-Identifier: Apache-2.0
"""Sizes and work of a diffusers pipeline, from its configs alone: it is built and run on the meta device.

To add a family, add what its transformer reads of a prompt to `READS`.
"""

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from verl.config.files.model_files import PIPELINE
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.rollout import RolloutConfig
from verl.diffusion.families.interface import GUIDANCE, Conditions
from verl.diffusion.families.registry import family_of
from verl.diffusion.model import trained_part
from verl.diffusion.options import size_of
from verl.distributed.fsdp import fsdp_blocks, torch_dtype
from verl.models.trainable import select_trainable
from verl.planning.diffusion.planned import PictureShape, Work
from verl.planning.diffusion.trace import traced, traced_update
from verl.planning.memory_model import ModelShape, Stack
from verl.planning.model_sizes import count, weight_counts
from verl.workers.model_builder import weights_dtype

VAE_BYTES = 4  # of a number of the VAE, which stays in float32
CONFIG = "config.json"
TRANSFORMER, VAE = "transformer", "vae"


@dataclass(frozen=True)
class Reads:
    """Inputs of a transformer that a prompt gives; sizes are names of fields of its config."""

    states: str  # width of the states of tokens
    more_tokens: int = 0  # in addition to those of the longest text encoder
    pooled: str | None = None  # width of the state of the whole prompt
    masks: bool = False  # prompts keep their own length, and a mask tells it

    def conditions(self, config: Any, rows: int, tokens: int, dtype: torch.dtype) -> Conditions:
        """Return what it reads of as many prompts, on the meta device."""
        sizes: dict[str, tuple[int, ...]] = {}
        sizes["encoder_hidden_states"] = tokens + self.more_tokens, getattr(config, self.states)
        if self.pooled is not None:
            sizes["pooled_projections"] = (getattr(config, self.pooled),)
        found = {name: _empty(rows, *size, dtype=dtype) for name, size in sizes.items()}
        if self.masks:
            found["encoder_hidden_states_mask"] = _empty(rows, tokens + self.more_tokens, dtype=torch.bool)
        return found


READS = {  # by class of pipeline
    "StableDiffusion3Pipeline": Reads("joint_attention_dim", 77, "pooled_projection_dim"),
    "FluxPipeline": Reads("joint_attention_dim", pooled="pooled_projection_dim"),
    "QwenImagePipeline": Reads("joint_attention_dim", more_tokens=5, masks=True),  # the end of its template
    "WanPipeline": Reads("text_dim"),
}


def read_pictures(
    model: ModelConfig, fsdp: FSDPConfig, rollout: RolloutConfig, prompt_length: int
) -> PictureShape:
    """Build the models of a pipeline without memory, and run each once.

    Raises:
        ValueError: The folder lacks a config or is of a pipeline that no family has, or `lora` does not fit
            the transformer.
    """
    folder, option = Path(model.model_path or ""), "worker.actor.model"
    family = family_of(folder)
    for name in (TRANSFORMER, VAE):
        if not (folder / name / CONFIG).is_file():
            raise ValueError(f"`{option}.model_path` ({folder}) lacks {name}/{CONFIG}, which has its sizes")
    parts: dict[str, Any] = {name: meta_part(folder, name) for name in model_names(folder)}
    pipeline = _pipeline(folder, parts)
    transformer, vae, trained = parts[TRANSFORMER], parts[VAE], trained_part(family, model, option)
    nn.Module.to(transformer, weights_dtype(fsdp, trained))  # its own method warns of what has no values yet
    select_trainable(transformer, trained, option)
    shape = _shape(transformer)
    blocks = tuple(count(block.parameters()) for block in fsdp_blocks(transformer))
    buffers = sum(buffer.nbytes for buffer in transformer.buffers())
    if model.enable_gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    computes_in, size = torch_dtype(fsdp.mp_param_dtype), size_of(rollout, family)
    nn.Module.to(transformer, computes_in)  # as FSDP gathers it
    latent = _empty(1, *family.latent_shape(pipeline, size))
    rows = 2 if family.predicts_twice(rollout.guidance_scale) else 1
    tokens = min(prompt_length, family.longest_prompt)
    reads = READS[index_of(folder)["_class_name"]]
    conditions = dict(reads.conditions(transformer.config, rows, tokens, computes_in))
    conditions |= {GUIDANCE: _empty(rows)} if family.reads_guidance else {}

    def velocity() -> Tensor:
        latents = torch.cat([latent] * rows).to(computes_in)
        return family.predict(transformer, latents, _empty(rows), conditions)

    encoders = [parts[name] for name in parts if name.startswith("text_encoder")]
    return PictureShape(
        transformer=shape,
        blocks=blocks,
        buffers=buffers,
        text_encoders=sum(num_bytes(encoder, computes_in.itemsize) for encoder in encoders),
        vae=num_bytes(vae, VAE_BYTES),
        latent=latent.nbytes,
        pixels=3 * size.height * size.width * size.frames,
        velocity=traced(velocity),
        update=traced_update(velocity, transformer),
        decoding=traced(lambda: family.decode(vae, latent)),
        encoding=_encoding(encoders, tokens),
    )


def _pipeline(folder: Path, parts: dict[str, nn.Module]) -> Any:
    """Build the pipeline without tokenizers and scheduler, which nothing here reads."""
    cls = getattr(diffusers, index_of(folder)["_class_name"])
    names, _ = cls._get_signature_keys(cls)
    return cls(**{name: parts.get(name) for name in names})


def _shape(transformer: Any) -> ModelShape:
    config, blocks = transformer.config, fsdp_blocks(transformer)
    heads, head_dim = config.num_attention_heads, config.attention_head_dim
    return ModelShape(
        **weight_counts(transformer, blocks),
        vocab=1,
        is_tied=False,
        text=Stack(
            layers=len(blocks), hidden=heads * head_dim, intermediate=0, heads=heads, kv_heads=heads,
            head_dim=head_dim, params=max(count(block.parameters()) for block in blocks),
        ),
    )  # fmt: skip


def _encoding(encoders: Iterable[nn.Module], tokens: int) -> Work:
    """Each token is multiplied with every weight but the embeddings."""
    weights = sum(count(encoder.parameters()) - _embeddings(encoder) for encoder in encoders)
    return Work(products=2.0 * weights * tokens)


def _embeddings(encoder: nn.Module) -> int:
    return sum(count(each.parameters()) for each in encoder.modules() if isinstance(each, nn.Embedding))


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def model_names(folder: Path) -> Iterator[str]:
    """Yield the names of a pipeline's models: `transformer`, `vae`, `text_encoder` and so on."""
    for name, entry in index_of(folder).items():
        if isinstance(entry, list) and None not in entry and (folder / name / CONFIG).is_file():
            yield name


def meta_part(folder: Path, name: str) -> nn.Module:
    """Build a model of a pipeline without memory."""
    library, kind = index_of(folder)[name]
    cls: Any = getattr(importlib.import_module(library), kind)
    with torch.device("meta"):
        if library == "diffusers":
            return cls.from_config(cls.load_config(folder / name))
        return cls(cls.config_class.from_pretrained(folder / name))


def num_bytes(module: nn.Module, number: int) -> int:
    """Return the bytes of weights and buffers of `number` bytes each."""
    return number * sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def index_of(folder: Path) -> dict[str, Any]:
    """Read the classes of a pipeline's parts."""
    return json.loads((folder / PIPELINE).read_text(encoding="utf-8"))
