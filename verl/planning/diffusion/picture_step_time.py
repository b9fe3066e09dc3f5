# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of a step of a diffusion run, phase by phase. Needs no torch."""

from verl.distributed.backends import USUAL_GPU
from verl.planning.diffusion.memory import held_pictures
from verl.planning.diffusion.planned import PictureShape, PlannedPictures, ReadPictures, Work
from verl.planning.memory_plan import HeldModel
from verl.planning.planned_run import PlannedRun
from verl.planning.speed.cluster import Cluster
from verl.planning.speed.operations import Operations
from verl.planning.speed.step_time import PhaseTime, StepTime, pass_parts, rest_of_step
from verl.planning.speed.workload import PassWork

FLOAT32_SHARE = 1 / 15  # of bfloat16's speed: 67 of 989 on an H100, 19.5 of 312 on an A100; for a VAE
TF32_SHARE = 1 / 2  # which cuDNN takes for the convolutions of a VAE in float32
STAGED_SHARE = 1 / 4  # of copies from page-locked memory, which the host fills first; an estimate


def predict_pictures(run: PlannedRun, read: ReadPictures, cluster: Cluster) -> StepTime:
    """Predict a run whose micro batch sizes are numbers."""
    pictures = run.pictures
    assert pictures is not None, "a diffusion run"
    shape = pictures.read(read)
    model = held_pictures(pictures, shape, cluster.world_size, USUAL_GPU)
    update = _updating(run, pictures, shape, model, cluster)
    phases = (
        _encoding(pictures, shape, cluster),
        _sampling(run, pictures, shape, model, cluster),
        _decoding(pictures, shape, cluster),
        update,
        *rest_of_step(run, [model], cluster),
    )
    trained = pictures.pictures * pictures.trained_steps * pictures.epochs
    once, weights = shape.velocity, shape.transformer
    # What an update of a latent cannot do without, which MFU counts.
    needed = trained * (once.products * (2 + weights.trained / weights.params) + 3 * once.attention)
    mfu = {"update_actor": needed / update.seconds / cluster.gpu.peak}
    made = float(pictures.pictures * cluster.world_size)
    return StepTime(phases, made, mfu, cluster.world_size, unit="pictures")


def _encoding(pictures: PlannedPictures, shape: PictureShape, cluster: Cluster) -> PhaseTime:
    """Text encoders go to the GPU once."""
    parts = {
        "products": pictures.prompts * shape.encoding.products / cluster.products,
        "copying text encoders": _staged(shape.text_encoders, cluster),
    }
    return PhaseTime("encode", parts)


def _sampling(
    run: PlannedRun, pictures: PlannedPictures, shape: PictureShape, model: HeldModel, cluster: Cluster
) -> PhaseTime:
    steps = pictures.rollout.num_steps
    work, calls = shape.velocity.times(steps * pictures.pictures), steps * _calls(pictures)
    return PhaseTime("gen", pass_parts(run, model, _operations(work), _pass(calls), cluster, is_update=False))


def _decoding(pictures: PlannedPictures, shape: PictureShape, cluster: Cluster) -> PhaseTime:
    work = shape.decoding.times(pictures.pictures)
    parts = {
        "convolutions": work.products / (TF32_SHARE * cluster.products),
        "attention": work.attention / (FLOAT32_SHARE * cluster.products),
        "elementwise": work.moved / cluster.memory,
        "copying the VAE": _staged(shape.vae, cluster),
    }
    return PhaseTime("decode", parts)


def _updating(
    run: PlannedRun, pictures: PlannedPictures, shape: PictureShape, model: HeldModel, cluster: Cluster
) -> PhaseTime:
    latents = pictures.pictures * pictures.trained_steps * pictures.epochs
    work = shape.update.times(latents)
    if pictures.reference:
        once = shape.velocity.times(latents)
        work = Work(work.products + once.products, work.attention + once.attention, work.moved + once.moved)
    passes = _pass(-(-latents // pictures.latents_at_once), pictures.updates)
    return PhaseTime(
        "update_actor", pass_parts(run, model, _operations(work), passes, cluster, is_update=True)
    )


def _operations(work: Work) -> Operations:
    return Operations(work.products, work.attention, head=0.0, elementwise=work.moved, softmax=0.0)


def _pass(calls: int, updates: int = 1) -> PassWork:
    return PassWork(0.0, 0.0, 0.0, 0.0, 0.0, calls, updates)


def _calls(pictures: PlannedPictures) -> int:
    return -(-pictures.pictures // pictures.pictures_at_once)


def _staged(size: int, cluster: Cluster) -> float:
    return size / (STAGED_SHARE * cluster.pcie)
