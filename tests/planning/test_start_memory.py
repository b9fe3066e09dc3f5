# SPDX-License-Identifier: Apache-2.0
"""Host memory of a start: planned for mixtures of 235B and 671B, and measured with a small one."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from tests.helpers.fp8_files import save_in_fp8
from tests.helpers.start_memory import RANKS, measure_start, save_as_published
from tests.virtual.shapes import SHAPES
from verl.config.model import FSDPConfig, ModelConfig
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.models.tiny import save_tiny_model
from verl.planning.memory_model import reading
from verl.planning.memory_plan import shape_of
from verl.planning.model_sizes import read_shape
from verl.planning.planned_run import planned_ppo
from verl.planning.report import ENGINE_SHARE, dry_run_memory
from verl.planning.speed.cluster import parse_cluster

GIB, MIB = 1 << 30, 1 << 20
TOLERANCE = 0.1
OFFLOADED = " ".join(
    f"worker.{key}=true"
    for key in (
        "actor.offload.offload_optimizer",
        "actor.offload.offload_params",
        "ref.offload.offload_params",
    )
)
# Two layers with 16 experts of gate, up and down: 192 MiB in float32, of which gate and up are 128.
MIXTURE = dict(
    num_hidden_layers=2,
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=1024,
)


def dry_run(folder, shape, on):
    kind, fields = SHAPES[shape]
    AutoConfig.for_model(kind, **fields, dtype="bfloat16").save_pretrained(folder)
    cluster = parse_cluster(on)
    options = {
        "data.train_files": "rows",
        "data.val_files": "rows",
        "data.rollout_batch_size": 512,
        "worker.actor.global_batch_size": 512,
        "worker.actor.model.model_path": folder,
        "worker.actor.fsdp.expert_parallel_size": 8,
        "worker.ref.fsdp.expert_parallel_size": 8,
        "worker.rollout.tensor_parallel_size": 8,
        "worker.rollout.n": 8,
        "worker.reward.reward_function": "examples/reward_function/math.py:compute_score",
    }
    given = [f"{key}={value}" for key, value in options.items()]
    config = load_config(PPOConfig, [*cluster.options, *given])
    return config, dry_run_memory(config, planned_ppo, machine=cluster.machine)


@pytest.mark.parametrize(
    ("shape", "on", "expert", "needed", "remedy"),
    [
        # 470 GB of weights in bfloat16 over 8 GPUs are 54.7 GiB, with 2 of activations.
        ("235b-a22b", "16x8xH100", 2 * 1536 * 4096, "56.8", f"set {ENGINE_SHARE}=0.75 {OFFLOADED}"),
        ("671b", "32x8xH100", 2 * 2048 * 7168, "158.3", "use GPUs with more memory or a smaller model"),
    ],
)
def test_the_first_rank_of_a_large_mixture_takes_two_experts_or_blocks_more_than_its_shard(
    tmp_path, shape, on, expert, needed, remedy
):
    config, plan = dry_run(tmp_path, shape, on)

    sizes = shape_of(planned_ppo(config).models[0], plan.planner.read_shape)
    (load,) = (line for line in plan.memory.splitlines() if line.startswith("  load "))
    # Gate and up of an expert and what they are joined to, in float32.
    assert reading(sizes) == 2 * max(4 * expert, 64 * MIB)
    assert f"first rank reads {reading(sizes) / GIB:.1f}" in load
    planned = plan.planner(config)
    phase = next(each for each in planned.phases if each.name == "load")
    without = planned.node_bytes(replace(phase, first_rank={}))
    assert planned.node_bytes(phase) - without == reading(sizes)
    assert f"the rollout engine needs {needed} GiB" in plan.memory
    assert f": {remedy}\n" in plan.memory


@pytest.mark.heavy
@pytest.mark.nightly("verl/workers")
@pytest.mark.parametrize("is_in_fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_rank_of_a_mixture_takes_what_is_planned_above_its_shard(is_in_fp8, tmp_path):
    tiny = save_tiny_model(tmp_path / "tiny", "qwen3_moe")
    folder = save_as_published(tmp_path / "mixture", "qwen3_moe", **MIXTURE)
    if is_in_fp8:
        save_in_fp8(folder)
    model = ModelConfig(model_path=str(folder))
    shape = read_shape(model, FSDPConfig(), option="worker.actor.model", is_trained=True)

    above, shard = measure_start(model, FSDPConfig(), tiny)

    # Parts of eight experts and what they are joined to in float32; then a block, and what a rank keeps.
    assert reading(shape) == 2 * 64 * MIB
    assert shard == pytest.approx(shape.stored / RANKS, rel=0.01)
    assert above == pytest.approx(reading(shape), rel=TOLERANCE), (above / MIB, shard / MIB)
