# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning against transformers' own, with labels of -100 on a padded batch.

Loss and gradients must not depend on packing, on how rows are cut into micro batches, on the number of ranks,
or on ranks sharing sequences. The labels are found here by another way than the trainer's: by the tokens that
surround a turn.
"""

import io
import json
from functools import partial

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from tests.equivalence.test_update import RecordingOptimizer, relative_errors
from tests.helpers.distributed import run_distributed
from tests.helpers.media import save_image
from verl.config.sft import SFTDataConfig
from verl.data.media.loader import MediaLoader
from verl.data.media.sizes import MediaOptions
from verl.data.readers import load_processor, load_tokenizer
from verl.data.sft_dataset import SFTDataset
from verl.models.families.registry import family_of
from verl.models.hub_names import auto_class
from verl.models.tiny import save_tiny_model
from verl.protocol import DataProto

pytestmark = pytest.mark.heavy

FAMILIES = {"text": "qwen2", "image": "qwen2_5_vl"}
MAX_LENGTH, IGNORED, TOLERANCE = 96, -100, 1e-5
MEDIA = MediaOptions(min_pixels=1, max_pixels=10**6)
SETTINGS = {  # options of `worker.actor`, ranks that share a sequence
    "one row": ({"micro_batch_size_per_device_for_update": 1, "dynamic_batching": False}, 1),
    "dynamic": ({"micro_batch_size_per_device_for_update": 1, "dynamic_batching": True}, 1),
    "all rows": ({"micro_batch_size_per_device_for_update": 8, "dynamic_batching": False}, 1),
    "sharded": ({"micro_batch_size_per_device_for_update": 2, "divide_short_sequences": True}, 2),
}
CONVERSATIONS = [
    [("user", "How many?"), ("assistant", "three"), ("user", "And the square?"), ("assistant", "red red")],
    [("system", "You are a helpful assistant."), ("user", "2 + 3"), ("assistant", "Let me think. 5")],
    [
        ("user", "<image>What colour?"),
        ("assistant", "blue"),
        ("user", "<image>And this?"),
        ("assistant", "0"),
    ],
    [("user", "Say nothing."), ("assistant", "")],
]


def make_batch(kind, folder, rows_file):
    """The rows as the trainer's own dataset makes them."""
    processor = load_processor(folder)
    positions = None
    if processor is not None:
        config = AutoConfig.from_pretrained(folder)
        positions = partial(family_of(config).positions, config)

    dataset = SFTDataset(
        str(rows_file), load_tokenizer(folder), processor,
        SFTDataConfig(max_length=MAX_LENGTH, filter_overlong_prompts_workers=1),
        media=None if processor is None else MediaLoader(processor, MEDIA), position_ids=positions,
    )  # fmt: skip
    return DataProto.from_single_dict(dataset.collate([dataset[number] for number in range(len(dataset))]))


def labels_of(batch, tokenizer):
    """Tokens between `<|im_start|>assistant\\n` and `<|im_end|>`, the latter included; -100 elsewhere."""
    head = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = batch.batch["input_ids"]
    labels = torch.full_like(ids, IGNORED)
    for row, tokens in enumerate(ids.tolist()):
        is_inside = False
        for place, token in enumerate(tokens):
            is_inside = is_inside or tokens[place - len(head) : place] == head
            if is_inside:
                labels[row, place] = token
            is_inside = is_inside and token != end
    return labels


def reference(kind, folder, batch, tokenizer):
    """transformers' loss on the padded batch, and its gradients."""
    config = AutoConfig.from_pretrained(folder)
    model = auto_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tensors, inputs = batch.batch, {}
    positions = tensors["position_ids"]
    if kind == "image":
        positions = positions.transpose(0, 1)
        refs = [ref for row in batch.non_tensor_batch["multi_modal_data"] if row for ref in row["images"]]
        images = [Image.open(ref if isinstance(ref, str) else io.BytesIO(ref)) for ref in refs]
        made = AutoProcessor.from_pretrained(folder).image_processor(images=images, return_tensors="pt")
        inputs = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
    loss = model(
        input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"], position_ids=positions,
        labels=labels_of(batch, tokenizer), use_cache=False, **inputs,
    ).loss  # fmt: skip
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def losses_on_ranks(rank, world_size, root, settings):
    """For each case the logged loss, the mean loss of validation, and the worst gradient."""
    from verl.config.model import FSDPConfig, ModelConfig
    from verl.config.sft import SFTActorConfig
    from verl.distributed.fsdp import make_mesh
    from verl.distributed.sequence_parallel import SequenceParallel
    from verl.workers.model_builder import build_model
    from verl.workers.packing.forward import PackedForward
    from verl.workers.packing.sp_strategy import Strategy
    from verl.workers.roles.updater import Training
    from verl.workers.sft_worker import DataParallelSFT

    found = {}
    for kind in FAMILIES:
        folder = root / kind / "model"
        whole = DataProto.load_from_disk(root / kind / "batch")
        _, expected = torch.load(root / kind / "reference.pt")
        for setting in settings:
            options, sp_size = SETTINGS[setting]
            model = build_model(
                ModelConfig(model_path=str(folder), enable_gradient_checkpointing=setting == "dynamic"),
                FSDPConfig(mp_param_dtype="fp32"),
                mesh=make_mesh(world_size, -1, "cpu"), device="cpu", trainable=True,
            )  # fmt: skip
            processor = load_processor(folder)
            media = None if processor is None else MediaLoader(processor, MEDIA)
            sp = SequenceParallel.build(sp_size, 1)
            forward = PackedForward(model, media, "cpu", sp=sp)
            if sp_size > 1:
                forward.strategies = [Strategy.SHARDED]
            optimizer = RecordingOptimizer(model)
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            config = SFTActorConfig(global_batch_size=len(whole), max_grad_norm=1e9, **options)
            sft = DataParallelSFT(config, forward, Training(optimizer, scheduler))
            dp_size, index = world_size // sp_size, rank // sp_size
            own = whole[index * len(whole) // dp_size : (index + 1) * len(whole) // dp_size]
            loss = sft.update(own)["train/loss"]
            errors = relative_errors(optimizer.gradients[0], expected)
            found[kind, setting] = (
                loss,
                sft.losses(own).sum().item(),
                max((error, name) for name, error in errors.items()),
                dp_size,
            )
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    for kind, family in FAMILIES.items():
        folder = save_tiny_model(root / kind / "model", family)
        rows = []
        for number, turns in enumerate(CONVERSATIONS):
            images = [
                save_image(root / kind / f"{number}-{place}.png", 56, 84, seed=place)
                for place in range(sum("<image>" in text for _, text in turns))
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            rows.append({"messages": messages} | ({"images": images} if kind == "image" else {}))
        rows_file = root / kind / "rows.jsonl"
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        batch = make_batch(kind, folder, rows_file)
        batch.save_to_disk(root / kind / "batch")
        torch.save(reference(kind, folder, batch, load_tokenizer(folder)), root / kind / "reference.pt")
    return root


def check(results, root):
    for kind, setting in results[0]:
        expected, _ = torch.load(root / kind / "reference.pt")
        batch = DataProto.load_from_disk(root / kind / "batch")
        num_tokens = batch.batch["loss_mask"].sum().item()
        for rank in results:
            loss, _, (error, name), _ = rank[kind, setting]
            assert loss == pytest.approx(expected, rel=TOLERANCE), (kind, setting)
            assert error < TOLERANCE, (kind, setting, name)
        *_, dp_size = results[0][kind, setting]
        validated = sum(rank[kind, setting][1] for rank in results) * dp_size / len(results)
        assert validated / num_tokens == pytest.approx(expected, rel=TOLERANCE), (kind, setting)


def test_the_learned_tokens_are_those_between_the_assistants_header_and_the_end_of_its_turn(root):
    for kind in FAMILIES:
        batch = DataProto.load_from_disk(root / kind / "batch")
        labels = labels_of(batch, load_tokenizer(root / kind / "model"))

        assert (labels != IGNORED)[:, 1:].long().equal(batch.batch["loss_mask"])
        assert (labels != IGNORED).any(-1).all()


@pytest.mark.nightly("verl/workers", "verl/trainer/sft_trainer.py")
def test_loss_and_gradients_equal_transformers_on_two_ranks_and_sharded_sequences(root):
    check(run_distributed(losses_on_ranks, 2, root, ["dynamic", "sharded"]), root)


@pytest.mark.slow
def test_loss_and_gradients_equal_transformers_on_one_rank(root):
    check(run_distributed(losses_on_ranks, 1, root, ["one row", "dynamic", "all rows"]), root)
