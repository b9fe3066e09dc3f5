# SPDX-License-Identifier: Apache-2.0
"""Predict what each choice of the plan saves of a step, and print the table of `docs/predicted_step.md`.

    python3 -m benchmarks.step_choices

Nothing is run. The first row has EasyR1's values, and each row has those of the rows above it, too.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published_steps import BF16, MODELS, ROOT, SWITCHES
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.planning.planned_run import planned_ppo, with_options
from verl.planning.report import dry_run_memory
from verl.planning.speed.cluster import parse_cluster
from verl.planning.speed.step_time import Predictor
from verl.utils.cuda_builds import repair_cuda_builds

PROMPT, RESPONSE = 385, 340  # tokens on average in EasyR1's runs on geometry3k
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {
        "model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
        "num_heads": 16, "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
ENGINE = "worker.rollout.tensor_parallel_size"
SIZE = "worker.actor.micro_batch_size_per_device_for"
UPDATE, EXPERIENCE = f"{SIZE}_update", f"{SIZE}_experience"


@dataclass(frozen=True)
class Run:
    """A run on geometry3k: its model and GPUs, and how its step was divided before and is now."""

    name: str
    config: dict[str, Any]
    cluster: str
    before: list[str]
    now: list[str]


MIXTURE_NOW = [f"{ENGINE}=2", f"{UPDATE}=8", f"{EXPERIENCE}=16", "worker.rollout.gpu_memory_utilization=0.7"]
RUNS = (
    Run("Qwen2.5-VL-7B", MODELS["Qwen2.5-VL-7B"], "8xH100", [], []),
    Run("Qwen2.5-VL-3B", MODELS["Qwen2.5-VL-3B"], "1xH100", [f"{ENGINE}=1"], [f"{ENGINE}=1", f"{UPDATE}=5"]),
    Run("Qwen3-VL-30B-A3B", MIXTURE, "8xH100", [*BF16, f"{ENGINE}=8"], [*BF16, *MIXTURE_NOW]),
)
PARTS = {  # options by the rows' names, besides those of the rows before
    "micro batches and engines that the advisor finds": [],
    "`compile_blocks=auto`": ["worker.actor.model.compile_blocks=auto"],
    "`enable_gradient_checkpointing=auto`": ["worker.actor.model.enable_gradient_checkpointing=auto"],
    "offloading `auto`": [
        *("worker.actor.offload.offload_params=auto", "worker.actor.offload.offload_optimizer=auto"),
        *("worker.ref.offload.offload_params=auto", "worker.ref.fsdp.enable_cpu_offload=false"),
    ],
}
FLASH = {"worker.actor.attention_kernel": "flash"}


def planned(run: Run, options: list[str], folder: Path) -> tuple[PPOConfig, Predictor[PPOConfig]]:
    """Return a run with numbers and choices instead of `auto`, and what predicts its step."""
    model = folder / run.name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(run.config))
    cluster = parse_cluster(run.cluster)
    paths = [f"config={ROOT / 'examples' / 'config.yaml'}", f"worker.actor.model.model_path={model}"]
    config = load_config(PPOConfig, [*paths, *cluster.options, *SWITCHES, *options])
    found = dry_run_memory(config, planned_ppo, machine=cluster.machine)
    assert found.planner is not None, found.problem
    assert not found.planner(found.config).misfits(), f"{run.name} {options} does not fit"
    return found.config, Predictor(found.planner, cluster, PROMPT, RESPONSE)


def seconds(run: Run, folder: Path) -> list[float]:
    """Predict the step of each row."""
    config, predict = planned(run, run.before, folder)
    found, options = [predict(config).seconds], list(run.now)
    for added in PARTS.values():
        options += added
        config, predict = planned(run, options, folder)
        found.append(predict(config).seconds)
    # A config with it is refused where the package is missing.
    return [*found, predict(with_options(config, FLASH)).seconds]


def lines(folder: Path) -> list[str]:
    """Return the rows of the table."""
    columns = [seconds(run, folder) for run in RUNS]
    names = ["values of EasyR1", *PARTS, "`attention_kernel=flash`, with FlashAttention 3"]
    rows = zip(names, *columns, strict=True)
    return [f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |" for name, *values in rows]


def main() -> None:
    repair_cuda_builds()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n".join(lines(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
