# SPDX-License-Identifier: Apache-2.0
"""A teacher that sees four times as many frames as the policy, against transformers' own forward pass."""

import json
import re
import sys

import pytest
import torch
import transformers

from tests.helpers.distributed import run_distributed
from tests.helpers.training import QUICKSTART
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig, DistillationLossConfig, TeacherConfig
from verl.config.model import ModelConfig
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_readers
from verl.data.rl_dataset import RLHFDataset, show_to_teachers
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

sys.path.insert(0, str(QUICKSTART))
from asking import find_positions, read_frames
from moving import write_video_questions

pytestmark = pytest.mark.heavy

ROWS, WIDTH, FRAMES = 3, 4, {"policy": 2, "teacher": 8}
SIZE = 56**2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    for seed, name in enumerate(FRAMES):
        save_tiny_model(folder / name, "qwen2_5_vl", seed=seed)
    write_video_questions(folder, "train", ROWS, 1)
    return folder


def data_of(folder):
    return DataConfig(
        train_files=str(folder / "train.jsonl"), prompt_key="problem", answer_key="answer",
        video_dir=str(folder / "videos"), image_dir=str(folder / "videos"), max_prompt_length=48,
        min_pixels=SIZE, max_pixels=SIZE, filter_overlong_prompts_workers=1,
    )  # fmt: skip


def batch_of(folder):
    """Prompts as policy and teacher see them, with responses."""
    data, options = data_of(folder), MediaOptions(SIZE, SIZE, num_video_frames=FRAMES["policy"])
    readers = load_readers(ModelConfig(model_path=str(folder / "policy")), None, options, None)
    dataset = RLHFDataset(
        data.train_files, readers.tokenizer, readers.processor, data, media=readers.media,
        position_ids=readers.position_ids,
    )  # fmt: skip
    teacher = TeacherConfig(str(folder / "teacher"), num_video_frames=FRAMES["teacher"], max_prompt_length=96)
    show_to_teachers(dataset, data, DistillationConfig(True, teacher_models={"t": teacher}), options, None)
    prompts = DataProto.from_single_dict(dataset.batch([dataset[row] for row in range(ROWS)]))
    responses = torch.randint(20, 250, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(responses)
    last = prompts.batch["prompt_position_ids"][..., -1:]
    return prompts.merge({
        "responses": responses,
        "loss_mask": ones,
        "input_ids": torch.cat([prompts.batch["prompts"], responses], -1),
        "attention_mask": torch.cat([prompts.batch["prompt_mask"], ones], -1),
        "position_ids": torch.cat(
            [prompts.batch["prompt_position_ids"], last + torch.arange(1, WIDTH + 1)], -1
        ),
    })  # fmt: skip


def log_probs_on_rank(rank, world_size, folder):
    from verl.config.model import FSDPConfig
    from verl.config.worker import ActorConfig
    from verl.data.media.loader import MediaLoader
    from verl.data.readers import load_processor
    from verl.distributed.fsdp import make_mesh
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward
    from verl.workers.roles.teachers import Teachers

    model = build_model(
        ModelConfig(model_path=str(folder / "teacher")),
        FSDPConfig(mp_param_dtype="fp32", torch_dtype="fp32"),
        mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=False,
    )  # fmt: skip
    options = MediaOptions(SIZE, SIZE, num_video_frames=FRAMES["teacher"])
    forward = PackedForward(model, MediaLoader(load_processor(folder / "teacher"), options), "cpu")
    teachers = Teachers({"t": forward}, DistillationLossConfig("mse"))
    config = ActorConfig(micro_batch_size_per_device_for_experience=2)
    return teachers.compute_log_probs("t", config, batch_of(folder), 1.0).tolist()


def plain_log_probs(folder, responses):
    """By transformers alone, one row at a time."""
    path = folder / "teacher"
    reader = transformers.AutoProcessor.from_pretrained(path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    found = []
    for line, response in zip((folder / "train.jsonl").read_text().splitlines(), responses, strict=True):
        row = json.loads(line)
        text = re.sub("<video>", "", row["problem"])
        content = [{"type": "video"}, {"type": "text", "text": text}]
        prompt = reader.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        media = read_frames(folder / "videos" / row["videos"][0], FRAMES["teacher"])
        inputs = reader(text=[prompt], return_tensors="pt", **media)
        positions = find_positions(model.config, inputs)["position_ids"]
        after = positions[..., -1:] + torch.arange(1, WIDTH + 1)
        ids = torch.cat([inputs.pop("input_ids"), response[None]], -1)
        inputs["attention_mask"] = torch.ones_like(ids)
        if "mm_token_type_ids" in inputs:
            kinds = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, WIDTH))
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.cat([positions, after], -1), **inputs).logits
        log_p = logits[0, -WIDTH - 1 : -1].log_softmax(-1)
        found.append(log_p.gather(-1, response[:, None])[:, 0])
    return torch.stack(found)


@pytest.mark.nightly("verl/trainer/served_teachers.py", "verl/workers")
def test_the_teachers_log_probs_are_those_of_its_own_frames(folder):
    batch = batch_of(folder)

    (found,) = run_distributed(log_probs_on_rank, 1, folder)

    expected = plain_log_probs(folder, batch.batch["responses"])
    assert (batch.batch["teacher_prompt_mask"].sum(-1) > batch.batch["prompt_mask"].sum(-1)).all()
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-5)
