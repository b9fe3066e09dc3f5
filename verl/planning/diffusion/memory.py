# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a diffusion run, phase by phase. Needs no torch."""

from collections.abc import Iterator

from verl.planning import memory_model
from verl.planning.diffusion.planned import PictureShape, PlannedPictures, ReadPictures
from verl.planning.machine import Machine, MemoryPlan, Parts, Phase
from verl.planning.memory_plan import (
    BATCH_COPIES,
    NODE_BYTES,
    PROCESS_BYTES,
    HeldModel,
    context_bytes,
    held_model,
    host_copies,
    working_parts,
)
from verl.planning.planned_run import PlannedRun

STAGED_BYTES = 1 << 26  # of a process while frozen models go to a GPU, see `diffusion/frozen_parts.py`


def plan_pictures(run: PlannedRun, read: ReadPictures, machine: Machine) -> MemoryPlan:
    """Add up what is in memory at the same time in each phase of a step."""
    pictures = run.pictures
    assert pictures is not None, "a diffusion run"
    shape = pictures.read(read)
    model = held_pictures(pictures, shape, run.trainer.world_size, machine.device)
    resting = {"weights": model.resting_weights, "optimizer": model.resting_state, "buffers": shape.buffers}
    reads = {"first rank reads": memory_model.reading(shape.transformer)}
    phases = [
        Phase("load", dict(resting), first_rank=reads),
        Phase("encode", resting | _fetched(machine, "text encoders", shape.text_encoders)),
        _sampling(pictures, shape, model, machine),
        _decoding(shape, model, machine),
        _updating(pictures, shape, model),
        Phase("save_checkpoint", dict(resting), {"copy": model.weights + model.state}),
    ]
    context = context_bytes(machine.device)
    picture = shape.pixels + (pictures.rollout.num_steps + 1) * shape.latent
    batch = run.batch_bytes + run.trainer.world_size * pictures.pictures * picture
    node = {"controller": NODE_BYTES, "batch": BATCH_COPIES * batch}
    host = {"process": PROCESS_BYTES} | host_copies(run, [model])
    frozen = {"text encoders and VAE": shape.text_encoders + shape.vae}
    if machine.device == "cpu":  # each process casts weights of another data type than its own
        host |= frozen
    else:
        host["staging buffer"] = STAGED_BYTES
        node |= frozen  # the pages of their files
    for phase in phases:
        phase.device.update({"context": context} if context else {})
        phase.host.update(host)
        phase.node.update(node)
    text = f"actor: {shape.transformer.trained_text}"
    return MemoryPlan(tuple(phases), machine, run.trainer.n_gpus_per_node, (text,))


def held_pictures(pictures: PlannedPictures, shape: PictureShape, world_size: int, device: str) -> HeldModel:
    """Share the transformer out among the ranks."""
    return held_model(pictures.model, world_size, device, lambda *_, **__: shape.transformer)


def _fetched(machine: Machine, name: str, size: int) -> Parts:
    """A frozen model on a GPU while it is used."""
    return {} if machine.device == "cpu" else {name: size}


def _sampling(pictures: PlannedPictures, shape: PictureShape, model: HeldModel, machine: Machine) -> Phase:
    device, host = working_parts(model, is_update=False)
    device |= _fetched(machine, "VAE", shape.vae)  # which decodes between calls of the sampler
    device |= {
        "buffers": shape.buffers,
        "gathered weights": memory_model.gathered(model.shape, model.setup),
        "activations": int(pictures.pictures_at_once * shape.velocity.peak),
    }
    return Phase("gen", device, host, size_option=pictures.sampling.size_option)


def _decoding(shape: PictureShape, model: HeldModel, machine: Machine) -> Phase:
    """Count the transformer too, whose root FSDP leaves gathered."""
    device, host = working_parts(model, is_update=False)
    device |= _fetched(machine, "VAE", shape.vae)
    kept = model.shape.params if model.setup.keeps_gathered else model.shape.root
    device |= {
        "buffers": shape.buffers,
        "gathered weights": model.setup.c * kept,
        "activations": int(shape.decoding.peak),
    }
    return Phase("decode", device, host)


def _updating(pictures: PlannedPictures, shape: PictureShape, model: HeldModel) -> Phase:
    device, host = working_parts(model, is_update=True)
    gathered, activations = max(_backward(pictures, shape, model), key=sum)
    device |= {"buffers": shape.buffers, "gathered weights": gathered, "activations": activations}
    return Phase(
        "update_actor", device, host, size_option=pictures.training.size_option, updated_role="actor"
    )


def _backward(pictures: PlannedPictures, shape: PictureShape, model: HeldModel) -> Iterator[tuple[int, int]]:
    """Yield bytes of gathered weights with their gradients, and of activations, of moments of the pass.

    Blocks run from the last to the first. A block holds most when it has computed its activations again, or
    when it has all of its gradients and they are being summed.
    """
    work, setup, number = shape.update, model.setup, len(shape.blocks)
    rows = pictures.latents_at_once
    per_block = 0 if setup.checkpointing else rows * work.kept / number  # freed with the block
    trained = model.shape.trained / model.shape.params
    for place in reversed(range(number)):
        block = shape.blocks[place]
        coming = shape.blocks[place - 1] if place and setup.ranks > 1 else 0  # the next one's, which arrive
        weights = int(setup.c * (model.shape.root + block + coming))
        kept = rows * work.kept - per_block * (number - 1 - place)
        yield weights, int(kept + rows * (work.peak - work.kept))
        yield weights + int((setup.c + setup.r) * trained * block), int(kept - per_block)
