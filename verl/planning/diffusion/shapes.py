# SPDX-License-Identifier: Apache-2.0
"""Sizes and work of a diffusers pipeline, from its configs alone: it is built and run on the meta device.

Layers of diffusion models differ too much for formulas: a model is run once in seconds, where tensors have
shapes and no values. To add a family, add what its transformer reads of a prompt to `READS`.
"""

import importlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from verl.config.files.model_files import PIPELINE
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.rollout import RolloutConfig
from verl.diffusion.families.interface import GUIDANCE, Conditions
from verl.diffusion.families.registry import family_of
from verl.diffusion.model import adapter_of, recomputes
from verl.diffusion.sampler import size_of
from verl.distributed.fsdp import fsdp_blocks, torch_dtype
from verl.models.trainable import select_trainable
from verl.planning.diffusion.planned import PictureShape, Work
from verl.planning.layer_sizes import Stack
from verl.planning.memory_model import ModelShape
from verl.planning.model_sizes import count, weight_counts
from verl.workers.model_builder import weights_dtype

VAE_BYTES = 4  # of a number of the VAE, which stays in float32
CONFIG = "config.json"
TRANSFORMER, VAE = "transformer", "vae"
ATTENTION = "scaled_dot_product"  # in the names of its kernels
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Reads:
    """Inputs of a transformer that a prompt gives; sizes are names of fields of its config."""

    states: str  # width of the states of tokens
    more_tokens: int = 0  # in addition to those of the longest text encoder
    pooled: str | None = None  # width of the state of the whole prompt
    masks: bool = False  # prompts keep their own length, and a mask tells it

    def conditions(self, config: Any, rows: int, tokens: int, dtype: torch.dtype) -> Conditions:
        """Return what it reads of as many prompts, on the meta device."""
        length = tokens + self.more_tokens
        found = {"encoder_hidden_states": _empty(rows, length, getattr(config, self.states), dtype=dtype)}
        if self.pooled is not None:
            found["pooled_projections"] = _empty(rows, getattr(config, self.pooled), dtype=dtype)
        if self.masks:
            found["encoder_hidden_states_mask"] = _empty(rows, length, dtype=torch.bool)
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
    transformer, vae, adapter = parts[TRANSFORMER], parts[VAE], adapter_of(family, model, option)
    nn.Module.to(transformer, weights_dtype(fsdp, is_whole=adapter is None))  # its own warns of empty ones
    select_trainable(transformer, model, option, adapter)
    shape = _shape(transformer)
    blocks = tuple(count(block.parameters()) for block in fsdp_blocks(transformer))
    buffers = sum(buffer.nbytes for buffer in transformer.buffers())
    if recomputes(model, option):
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

    encoders = [part for name, part in parts.items() if name.startswith("text_encoder")]
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
    weights = 0
    for encoder in encoders:
        embeddings = [each for each in encoder.modules() if isinstance(each, nn.Embedding)]
        weights += count(encoder.parameters()) - sum(count(each.parameters()) for each in embeddings)
    return Work(products=2.0 * weights * tokens)


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


def traced(function: Callable[[], Any]) -> Work:
    """Run a function without gradients."""
    with torch.no_grad(), _Trace() as trace, _gpu_attention():
        function()
    return trace.work()


def traced_update(function: Callable[[], Tensor], model: nn.Module) -> Work:
    """Run a function and its backward pass; gradients of weights are not counted as memory."""
    hooks = [
        param.register_post_accumulate_grad_hook(_drop_gradient)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        # In another thread the mode would not be active.
        with torch.autograd.set_multithreading_enabled(False), _Trace() as trace, _gpu_attention():
            loss = function().sum()
            kept = trace.live
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return trace.work(kept)


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


class _Trace(TorchDispatchMode):
    """Counts operations, and the bytes of tensors that are made inside the block and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.products = self.attention = self.moved = 0.0
        self._held: set[int] = set()

    def work(self, kept: int = 0) -> Work:
        return Work(self.products, self.attention, self.moved, self.peak, kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = _tensors((args, kwargs)), _tensors(out)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=out)
            if ATTENTION in func.__name__:
                self.attention += count
            else:
                self.products += count
        elif not func.is_view:
            self.moved += sum(tensor.nbytes for tensor in (*read, *made))
        given = {id(tensor.untyped_storage()) for tensor in read}
        for tensor in made:
            if id(tensor.untyped_storage()) not in given:  # else a view, also of weights
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._held:
            return
        size = storage.nbytes()
        self._held.add(key)
        weakref.finalize(storage, self._free, key, size).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _gpu_attention() -> Iterator[None]:
    """Take the kernel of GPUs, which keeps no scores, instead of the one that other devices have."""
    # A `TorchFunctionMode` would be off where checkpointing computes a block again.
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _flash
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _aten._scaled_dot_product_flash_attention(query, key, value)[0]
