# SPDX-License-Identifier: Apache-2.0
"""One rank of a virtual cluster: the project's worker, as it is, on a virtual GPU.

    echo '{"shape": "7b", "ranks": 64, "setup": {}}' | python -m tests.virtual.cluster

Reads a configuration from each line and writes its result as a line of JSON. Each runs in a fork of this
process, which has imported everything, so that no device, mode or process group outlives it.

Not the project's own: no weights are read from files, the rollout engine drops what it receives, the frames
of videos are not enlarged, a tower's weights have no digest, and the verdict of `check_model`, which compares
numbers, is ignored.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.utils.cuda_builds import repair_cuda_builds

repair_cuda_builds()  # before transformers is imported

# isort: split
import torch
import torchao  # noqa: F401 - before the device exists: its first import looks at all devices
from torch import Tensor

from tests.helpers.media import save_video
from tests.virtual import mistakes
from tests.virtual.device import TYPE, install, start_processes
from tests.virtual.mode import VirtualGPU, count_lists, skip_head_kernels, track_resizes
from tests.virtual.pictures import build_picture_worker, run_picture_phases, substitute_pictures
from tests.virtual.pipelines import write_pipeline
from tests.virtual.shapes import FRAME, FRAME_TOKENS, SHAPES, PictureSetup, Setup
from tests.virtual.stored import read_virtual_files, write_virtual_files
from tests.virtual.tally import Tally

Phase = Callable[[str], AbstractContextManager[None]]

FP8 = "fp8"  # of `Setup.files`
SCORER = "scorer"  # folder of the reward model, next to the policy's files
SCORERS = {
    "qwen2": "Qwen2ForSequenceClassification", "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "qwen2_5_vl": "Qwen2_5_VLForSequenceClassification", "vila": "VilaForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForSequenceClassification",
}  # fmt: skip
PATCH = 28  # pixels of a merged patch
VERSION = 0  # of all weights


class Engine:
    """Takes weights and drops them; records what it was given."""

    takes_adapter = takes_embeddings = embeds_prompts = keeps_weights = False
    dtype = torch.bfloat16

    def __init__(self, takes_adapter: bool, tally: Tally) -> None:
        self.takes_adapter, self.tally = takes_adapter, tally

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            self.tally.phase.given.append((name, tensor.nbytes))

    def sync_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        self.sync_weights(tensors.items())

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def rng_state(self) -> dict[str, Any]:
        return {}


class LinkGroup:
    """The two processes of a link, of which the other takes at once what it is sent."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "LinkGroup":
        assert [tensor.device.type for tensor in tensors] == [TYPE]
        return self  # as the work that was queued

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...

    def abort(self) -> None: ...


def write_model(folder: Path, shape: str, override: dict[str, Any]) -> None:
    """Write the config of a model, with the tokenizer and the processor of a tiny one."""
    from verl.models.auto import AutoConfig
    from verl.models.tiny import TINY_MODELS, train_tokenizer
    from verl.models.vila.processor import VilaProcessor

    kind, fields = SHAPES[shape]
    config = AutoConfig.for_model(kind, **fields | override)
    config.save_pretrained(folder)
    if kind == "vila":
        tokenizer = train_tokenizer(recipe=TINY_MODELS[kind])
        settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        VilaProcessor(tokenizer, settings, config).save_pretrained(folder)
        return
    scorer = AutoConfig.for_model(kind, **fields | override, num_labels=1)
    scorer.architectures = [SCORERS[kind]]
    scorer.save_pretrained(folder / SCORER)
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    tokenizer.save_pretrained(folder / SCORER)
    if kind in TINY_MODELS and TINY_MODELS[kind].processor:
        processor = TINY_MODELS[kind].processor(tokenizer)
        processor.chat_template = tokenizer.chat_template
        processor.image_processor.size = {"shortest_edge": PATCH**2, "longest_edge": 1 << 24}  # pixels
        processor.save_pretrained(folder)


def substitute(tally: Tally, phase: Phase, *, has_files: bool) -> None:
    """Replace what needs files and values, and measure reading as a phase of its own."""
    import torch.distributed as dist

    from verl.distributed.expert_parallel import Counts
    from verl.distributed.weights import peer_link
    from verl.models import registry
    from verl.models.hub_names import meta_model
    from verl.models.mixture import experts
    from verl.models.vila.processor import VilaProcessor
    from verl.workers import engine_host, model_builder
    from verl.workers.base_worker import ModelWorker
    from verl.workers.packing.vision_features import FrozenTower, TrainedTower
    from verl.workers.training_worker import TrainingWorker

    def read_model(model: Any, config: Any, dtype: Any, trainable: bool, option: str) -> Any:
        source = meta_model(config, dtype)
        source.to_empty(device="cpu")
        return source

    def engine(config: Any, setup: Any) -> Engine:
        return Engine(setup.adapter is not None, tally)

    def as_phase(function: Callable[..., Any]) -> Callable[..., Any]:
        def loading(*args: Any) -> Any:
            with phase("load"):
                return function(*args)

        return loading

    new_group = dist.new_group

    def frame_pixels(_: Any, frames: Any) -> Tensor:
        return torch.zeros(1, 3, FRAME, FRAME).expand(len(frames), -1, -1, -1)

    def fake_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs)  # of any backend: its ranks do not exist

    def own_objects(objects: list[Any], src: int = 0, **_: Any) -> None:
        """The other ranks' objects equal this one's."""

    def gathered(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    def even_counts(chosen: Tensor, num_experts: int, group: Any) -> Counts:
        # as many for each expert, since no one can know how routers choose; without the wait for the device
        theirs = chosen.new_empty(num_experts)
        dist.all_to_all_single(theirs, chosen.new_zeros(num_experts), group=group)
        ranks, total = dist.get_world_size(group), len(chosen)
        rows = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        return Counts(rows, rows, theirs.view(ranks, -1))

    experts.exchange_counts = even_counts
    VilaProcessor.frame_pixels = frame_pixels
    FrozenTower._name_weights = TrainedTower._name_weights  # whatever the values
    ModelWorker._encoded_media = TrainingWorker._sent_weights = lambda self: {}  # sums over the ranks
    FrozenTower._missing = lambda self, found: [key for key, entry in found.items() if entry is None]
    model_builder._read_model = as_phase(model_builder._read_model if has_files else read_model)
    model_builder.fill_model = as_phase(model_builder.fill_model)
    engine_host.build_rollout_engine = engine
    registry.TOLERANCE = dict.fromkeys(registry.TOLERANCE, float("inf"))
    dist.new_group = fake_group
    peer_link.make_group = lambda *_: LinkGroup()
    dist.broadcast_object_list, dist.all_gather_object = own_objects, gathered


def mark_micro_batches(tally: Tally) -> None:
    from verl.workers.packing.schedule import MicroBatchSchedule

    original = MicroBatchSchedule.micro_batches

    def micro_batches(self: Any, batch: Any) -> Iterator[Any]:
        for micro_batch in original(self, batch):
            tally.begin_micro_batch()
            yield micro_batch
            tally.end_micro_batch()

    MicroBatchSchedule.micro_batches = micro_batches


def worker_config(folder: Path, setup: Setup, ranks: int) -> Any:
    from verl.config.model import FSDPConfig, LoraConfig, ModelConfig, OffloadConfig, OptimConfig
    from verl.config.sft import SFTActorConfig, SFTWorkerConfig
    from verl.config.worker import (
        ActorConfig,
        CriticConfig,
        PrimeConfig,
        RefConfig,
        RewardModelConfig,
        WorkerConfig,
    )

    path = str(folder)
    plain = ModelConfig(model_path=path, enable_gradient_checkpointing=setup.checkpointing)
    policy = replace(plain, lora=LoraConfig(rank=setup.lora_rank), freeze_vision_tower=setup.freeze_tower)
    common: dict[str, Any] = dict(
        global_batch_size=setup.prompts * ranks // (setup.ulysses * setup.ring * setup.tensor_parallel),
        micro_batch_size_per_device_for_update=setup.rows_at_once,
        micro_batch_size_per_device_for_experience=setup.rows_at_once,
        dynamic_batching=setup.dynamic,
        optim=OptimConfig(strategy=setup.optimizer),
        offload=OffloadConfig(setup.offload, setup.offload),
    )
    fsdp = FSDPConfig(
        fsdp_size=setup.fsdp_size, torch_dtype=setup.dtype, expert_parallel_size=setup.expert_parallel,
        tensor_parallel_size=setup.tensor_parallel,
    )  # fmt: skip
    parallel: dict[str, Any] = dict(
        ulysses_size=setup.ulysses, ring_size=setup.ring, divide_short_sequences=setup.always_shards
    )
    own = dict(model=policy, fsdp=replace(fsdp, enable_cpu_offload=setup.cpu_offload))
    if setup.fine_tuning:
        common["global_batch_size"] *= setup.responses  # rows
        return SFTWorkerConfig(SFTActorConfig(**common | parallel | own))
    frozen = replace(fsdp, torch_dtype=None)
    scorer = ModelConfig(f"{path}/{SCORER}") if setup.reward_model else ModelConfig()
    return WorkerConfig(
        actor=ActorConfig(**common | parallel | own, share_prompt=setup.share_prompt),
        critic=CriticConfig(**common, model=plain, fsdp=fsdp),
        prime=PrimeConfig(**common, model=plain, fsdp=fsdp),
        reward_model=RewardModelConfig(
            setup.rows_at_once, model=scorer, fsdp=frozen,
            offload=OffloadConfig(setup.offload),
        ),
        ref=RefConfig(fsdp=frozen, offload=OffloadConfig(setup.offload)),
    )  # fmt: skip


def build_worker(folder: Path, setup: Setup, ranks: int) -> Any:
    """Make the worker as its process does, but for the process group, which exists."""
    import torch.distributed as dist

    from verl.config.algorithm import RolloutCorrectionConfig
    from verl.data.media.cache import MediaCache
    from verl.data.media.sizes import MediaOptions
    from verl.workers.fsdp_worker import FSDPWorker
    from verl.workers.roles.actor import KLLoss
    from verl.workers.run_options import ModelRunOptions, RunOptions
    from verl.workers.sft_worker import SFTWorker

    config = worker_config(folder, setup, ranks)
    media = MediaOptions(min_pixels=1, max_pixels=10**8, num_video_frames=setup.frames or None)
    shared = dict(
        device=TYPE, training_steps=10, media=media, media_cache=MediaCache(None),
        override_chat_template=None,
        seed=0,
    )  # fmt: skip
    dist.init_process_group = lambda backend: None  # of the worker: `start_processes` was first
    if setup.fine_tuning:
        return SFTWorker(config, ModelRunOptions(**shared))
    config = replace(config, rollout=replace(config.rollout, n=setup.responses))
    options = RunOptions(
        **shared,
        max_sequence_length=setup.prompt_length + setup.response_width,
        max_response_length=setup.response_width,
        use_reference=setup.reference,
        use_critic=setup.critic,
        use_prime=setup.prime,
        kl_loss=KLLoss("low_var_kl", 1e-2) if setup.reference else None,
        has_full_kl_in_rewards=False,
        has_sum_squares=False,
        rollout_correction=RolloutCorrectionConfig(),
        corrects_in_update=False,
        accuracy_key="accuracy",
    )
    return FSDPWorker(config, options)


def make_batch(folder: Path, shape: str, setup: Setup, position_rows: int) -> Any:
    """Rows in host memory: left-padded prompts with images, right-padded responses."""
    import numpy as np
    from PIL import Image

    from verl.protocol import DataProto

    width, height = setup.image_size
    tokens = (width // PATCH) * (height // PATCH)
    image_id = SHAPES[shape][1].get("image_token_id", 0)
    rows = setup.prompts * setup.responses
    ids = torch.full((rows, setup.prompt_length + setup.response_width), 7)
    mask = torch.ones_like(ids)
    media, uids, picture = [], [], folder / "image.png"
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(picture)
    film = [save_video(folder / "film.mp4", 32, 32, setup.frames)] if setup.frames else []
    video = torch.full((FRAME_TOKENS + 1,), SHAPES[shape][1].get("video_token_id", 0))
    video[-1] = 7
    for row in range(rows):
        prompt = row // setup.responses
        count = setup.images[prompt % len(setup.images)]
        start = 1
        for _ in range(count):
            ids[row, start : start + tokens] = image_id
            start += tokens + 1
        ids[row, start : start + setup.frames * len(video)] = video.repeat(setup.frames)
        start += setup.frames * len(video)
        assert start < setup.prompt_length, "the images fit into the prompt"
        length = setup.response_lengths[row % len(setup.response_lengths)]
        mask[row, setup.prompt_length + length :] = 0
        uids.append(f"prompt {prompt}")
        held = {"images": [str(picture)] * count, "videos": film}
        media.append({name: refs for name, refs in held.items() if refs})
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if position_rows > 1:
        positions = positions[:, None].expand(-1, position_rows, -1).contiguous()
    response_mask = mask[:, setup.prompt_length :]
    zeros = torch.zeros(response_mask.shape)
    tensors = {
        "input_ids": ids, "attention_mask": mask, "position_ids": positions,
        "responses": ids[:, setup.prompt_length :],
        "response_mask": response_mask, "loss_mask": response_mask,
        "old_log_probs": zeros, "ref_log_probs": zeros, "advantages": zeros, "returns": zeros,
        "values": zeros, "prime_ref_log_probs": zeros, "token_level_scores": zeros,
        "accuracies": torch.ones(rows),
    }  # fmt: skip
    objects: dict[str, Any] = {"uid": uids}
    if any(media):
        objects["multi_modal_data"] = media
    return DataProto.from_dict(tensors, objects)


def run_phases(worker: Any, batch: Any, setup: Setup, phase: Phase, tally: Tally) -> None:
    """Do one step's work of a rank, in the trainer's order."""
    if setup.fine_tuning:
        with phase("validation"):
            worker.compute_losses(batch)
        for _ in range(setup.updates):
            with phase("update_actor"):
                worker.update(batch)
    else:
        with phase("sync_weights"):
            worker.sync_weights(VERSION)
        if worker.encodes_media():
            with phase("encode"):
                list(worker.encode_media(batch))
        with phase("old"):
            worker.compute_log_probs(batch)
        if setup.reference:
            with phase("ref"):
                worker.compute_ref_log_probs(batch)
        if setup.reward_model:
            with phase("reward_model"):
                worker.compute_reward_model_scores(batch)
        if setup.prime:
            with phase("prime_ref"):
                worker.compute_prime_ref_log_probs(batch)
            with phase("update_prime"):
                worker.update_prime(batch)
            with phase("process_rewards"):
                worker.compute_process_rewards(batch)
        if setup.critic:
            with phase("values"):
                worker.compute_values(batch)
            with phase("update_critic"):
                worker.update_critic(batch)
        for _ in range(setup.updates):
            with phase("update_actor"):
                worker.update_actor(batch, 0.01, 0)
    if setup.own_engine:
        with phase("publish_weights"):
            worker.publish_weights(VERSION)
        with phase("send_weights"):
            send_weights(worker)
    with phase("save_checkpoint"):
        files = (worker.tokenizer, worker.processor) if worker.rank == 0 else None
        for model in worker.trained:
            snapshot = model.snapshot(model_only=False, copies=True, extra={}, files=files)
            tally.phase.written += written_bytes(snapshot.tensors, worker.rank)


def written_bytes(tensors: dict[str, Tensor], rank: int) -> int:
    """Count what torch.distributed.checkpoint lets a rank write of its part of a checkpoint."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    plan = create_default_local_save_plan(tensors, is_coordinator=rank == 0)
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(part.properties.dtype.itemsize * part.chunk.sizes.numel() for part in parts)


def send_weights(worker: Any) -> None:
    """Send an engine this rank's share, as a thread of the worker does."""
    from multiprocessing import Pipe

    from verl.distributed.weights.peer_link import SENDER, PeerLink

    here, _there = Pipe()
    link = PeerLink(here, SENDER, worker.device, address="")
    worker.publisher._answer(link, VERSION)
    link.close()
    worker.publisher.close()


def run_texts(folder: Path, spec: dict[str, Any], setup: Setup, phase: Phase, tally: Tally) -> None:
    worker = build_worker(folder, setup, spec["ranks"])
    with phase("init_model"):
        worker.init_model()
    batch = make_batch(folder, spec["shape"], setup, worker.policy.forward.family.position_rows)
    run_phases(worker, batch, setup, phase, tally)


def run_pictures(folder: Path, spec: dict[str, Any], setup: PictureSetup, phase: Phase) -> None:
    substitute_pictures(phase)
    worker = build_picture_worker(folder, setup, spec["ranks"])
    with phase("init_model"):
        worker.init_model()
    run_picture_phases(worker, setup, phase)


def run(spec: dict[str, Any], on_error: Callable[[Exception], None] = lambda error: None) -> dict[str, Any]:
    setup = (PictureSetup if spec.get("pictures") else Setup)(**spec["setup"])
    os.environ |= {"RANK": str(setup.rank), "WORLD_SIZE": str(spec["ranks"]), "LOCAL_RANK": "0"}
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads would read outside of the mode
    torch.set_num_threads(1)
    tally = Tally()
    install(tally)
    track_resizes(tally)
    count_lists(tally)
    skip_head_kernels()
    start_processes(setup.rank, spec["ranks"])
    mark_micro_batches(tally)
    if spec.get("mistake"):
        getattr(mistakes, spec["mistake"])()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.perf_counter()
        with tally.measured(name) as measured:
            yield
        measured.seconds += time.perf_counter() - start

    files = getattr(setup, "files", None)
    substitute(tally, phase, has_files=files is not None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(setup, PictureSetup):
            write_pipeline(folder, spec["shape"], setup.layers)
        else:
            write_model(folder, spec["shape"], setup.override)
        if files is not None:
            write_virtual_files(folder, in_fp8=files == FP8)
        with VirtualGPU(tally) as mode:
            mode.on_error = on_error
            if files is not None:
                read_virtual_files(mode.fake, tally, in_fp8=files == FP8)
            if isinstance(setup, PictureSetup):
                run_pictures(folder, spec, setup, phase)
            else:
                run_texts(folder, spec, setup, phase, tally)
    return {name: phase.to_json() for name, phase in tally.phases.items()}


def preload() -> None:
    """Import what every configuration needs, before the first fork."""
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    import verl.workers.fsdp_worker
    import verl.workers.sft_worker

    assert modeling_qwen2 and modeling_qwen2_5_vl and modeling_qwen3_moe and verl.workers


def failure(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(error))}


def answer(line: str) -> None:
    """Run one configuration and print its result; an error is a result."""

    def reply(result: dict[str, Any]) -> None:
        print(json.dumps(result | {"seconds": time.process_time() - start}), flush=True)
        os._exit(0)

    start = time.process_time()
    try:
        reply({"phases": run(json.loads(line), lambda error: reply(failure(error)))})
    except Exception as error:  # of any kind: the parent names it
        reply(failure(error))


def main() -> None:
    preload()
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            answer(line)
        os.waitpid(child, 0)
    os._exit(0)  # nothing is left to be done, and torch takes its time


if __name__ == "__main__":
    main()
