# SPDX-License-Identifier: Apache-2.0
"""Predict the steps of runs that others published, and print the table of `docs/predicted_step.md`.

    python3 benchmarks/published_steps.py

Nothing is run: each line is the prediction of `--dry-run` for the options, lengths and devices of the source.
"""

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.config.ppo import PPOConfig
from verl.config.schema import load_config
from verl.planning.machine import GIB, Machine
from verl.planning.planned_run import planned_ppo
from verl.planning.report import make_planner
from verl.planning.speed.cluster import Cluster, parse_cluster
from verl.planning.speed.modes import drawn_lengths, predicted_costs
from verl.planning.speed.simulation import SimulatedWork, simulate
from verl.planning.speed.step_time import Predictor, StepTime
from verl.utils.cuda_builds import repair_cuda_builds

ROOT = Path(__file__).parents[1]
EASYR1 = "EasyR1"  # assets/baselines.md
VERL = "verl"  # logs of github.com/eric-haibin-lin/verl-data
GEOMETRY = [
    "worker.actor.share_prompt=false",
    "trainer.async_save=false",
]  # else the defaults of examples/config.yaml, which are EasyR1's
# Switches that examples/config.yaml leaves to the plan of memory, as EasyR1 has them.
SWITCHES = [
    *("worker.actor.model.enable_gradient_checkpointing=true", "worker.actor.model.compile_blocks=false"),
    *("worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true"),
    *("worker.ref.offload.offload_params=false", "worker.ref.fsdp.enable_cpu_offload=true"),
]
BF16 = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16"]
LORA = [  # one update of a rollout batch: here it needs no pass for the old log-probs, there it has one
    *("worker.actor.share_prompt=false", "worker.actor.dynamic_batching=false", "data.rollout_batch_size=64"),
    *("worker.actor.global_batch_size=64", "data.max_prompt_length=1024", "data.max_response_length=512"),
    *("worker.actor.model.lora.rank=32", "worker.rollout.enforce_eager=true", "trainer.save_freq=-1"),
    *("worker.actor.micro_batch_size_per_device_for_update=8", "worker.rollout.max_num_batched_tokens=1536"),
    "worker.actor.micro_batch_size_per_device_for_experience=8",
]


def text_model(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 151936 if tied else 152064,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def vision_model(text: dict[str, Any], vision_intermediate: int = 3420) -> dict[str, Any]:
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": vision_intermediate, "num_heads": 16,
        "out_hidden_size": text["hidden_size"], "model_type": "qwen2_5_vl",
    }  # fmt: skip
    names = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    return text | names | {"vision_config": vision}


MODELS = {
    "Qwen2.5-VL-3B": vision_model(text_model(2048, 11008, 36, 16, 2, tied=True)),
    "Qwen2.5-VL-7B": vision_model(text_model(3584, 18944, 28, 28, 4)),
    "Qwen2.5-VL-32B": vision_model(text_model(5120, 27648, 64, 40, 8), 3456),
    "Qwen2.5-1.5B": text_model(1536, 8960, 28, 12, 2, tied=True),
    "Qwen2.5-3B": text_model(2048, 11008, 36, 16, 2, tied=True),
    "Qwen2.5-32B": text_model(5120, 27648, 64, 40, 8),
    "Qwen2-7B": text_model(3584, 18944, 28, 28, 4),
    "Qwen2.5-7B": text_model(3584, 18944, 28, 28, 4),
    "Qwen2.5-72B": text_model(8192, 29568, 80, 64, 8),
}


@dataclass(frozen=True)
class Published:
    """A published run: its options, mean lengths, and the figures of its source."""

    source: str
    model: str
    cluster: str
    options: list[str]
    prompt: float
    response: float
    seconds: dict[str, float]  # by phase; "step" is all of it
    mfu: float | None = None  # of the policy's update, in percent
    setting: str = ""


def easyr1(
    model: str, cluster: str, response: float, seconds: float, mfu: float, setting: str, *options: str
) -> Published:
    chosen = [*GEOMETRY, *options]
    return Published(EASYR1, model, cluster, chosen, 385, response, {"step": seconds}, mfu, setting)


def lora(
    model: str, ranks: int, share: float, response: float, seconds: dict[str, float], mfu: float
) -> Published:
    options = [
        *LORA,
        f"worker.rollout.tensor_parallel_size={ranks}",
        f"worker.rollout.gpu_memory_utilization={share}",
    ]
    return Published(VERL, model, "8xH100", options, 118, response, seconds, mfu, "LoRA, MATH")


RUNS = (
    easyr1("Qwen2.5-VL-3B", "8xH100", 290, 120, 8.1, "AMP, 1 / 2"),
    easyr1("Qwen2.5-VL-7B", "8xH100", 340, 145, 16.0, "AMP, 1 / 2"),
    easyr1(
        *("Qwen2.5-VL-7B", "8xH100", 365, 120, 23.2, "AMP, 4 / 8"),
        "worker.actor.micro_batch_size_per_device_for_update=4",
        "worker.actor.micro_batch_size_per_device_for_experience=8",
    ),
    easyr1("Qwen2.5-VL-7B", "8xL20", 358, 580, 26.5, "AMP, 1 / 2"),
    easyr1("Qwen2.5-VL-7B", "8xH100", 340, 145, 16.0, "BF16, 1 / 2", *BF16),
    easyr1(
        *("Qwen2.5-VL-32B", "8xH100", 640, 530, 25.8, "BF16, 1 / 2"),
        *(*BF16, "worker.rollout.tensor_parallel_size=8"),
    ),
    Published(
        VERL, "Qwen2-7B", "8xH20",
        [
            *("worker.actor.share_prompt=false", "worker.actor.dynamic_batching=false"),
            *("data.rollout_batch_size=1024", "worker.actor.global_batch_size=256"),
            *("data.max_prompt_length=512", "data.max_response_length=1024"),
            "worker.actor.micro_batch_size_per_device_for_update=40",
            "worker.actor.micro_batch_size_per_device_for_experience=40",
            *("worker.actor.model.enable_gradient_checkpointing=false", "worker.rollout.enforce_eager=true"),
            "trainer.save_freq=-1",
        ],
        94.6, 168.5, {"gen": 39.2, "old": 22.8, "ref": 22.5, "update_actor": 68.8, "step": 154.4}, 77.8,
        "FSDP2, GSM8K",
    ),
    lora(
        "Qwen2.5-7B", 2, 0.2, 314, {"gen": 26.8, "ref": 1.1, "update_actor": 7.3, "step": 37.8},
        12.0,
    ),
    lora(
        "Qwen2.5-72B", 8, 0.4, 288,
        {"gen": 108.4, "ref": 8.2, "update_actor": 28.3, "step": 155.2},
        28.8,
    ),
)  # fmt: skip


BY_HAND = [
    *("data.max_prompt_length=1024", "data.max_response_length=2048", "trainer.save_freq=-1"),
    *("worker.rollout.tensor_parallel_size=1", "worker.actor.micro_batch_size_per_device_for_update=5"),
    "worker.actor.micro_batch_size_per_device_for_experience=5",
]
RUNS += tuple(
    Published("by hand", model, "8xH100", BY_HAND, 512, 800, seconds, None, "shared prompts")
    for model, seconds in (
        ("Qwen2.5-7B", {"gen": 35, "old": 12, "ref": 12, "update_actor": 48, "step": 115}),
        ("Qwen2.5-3B", {"gen": 21.3, "old": 5, "ref": 5, "update_actor": 21, "step": 57}),
    )
)


ADAPTERS = ["worker.actor.model.lora.rank=32", "worker.actor.fsdp.torch_dtype=bf16"]
HARDWARE = {  # EasyR1's table of what each method needs: GPUs and their memory
    "full, AMP": {"1.5B": (2, 24), "3B": (4, 40), "7B": (8, 40), "32B": (16, 80), "72B": (32, 80)},
    "full, BF16": {"1.5B": (1, 24), "3B": (1, 40), "7B": (4, 40), "32B": (8, 80), "72B": (16, 80)},
    "LoRA, AMP": {"1.5B": (1, 12), "3B": (1, 24), "7B": (2, 32), "32B": (2, 80), "72B": (4, 80)},
}
METHODS = {"full, AMP": [], "full, BF16": BF16, "LoRA, AMP": ADAPTERS}


@dataclass(frozen=True)
class PublishedStream:
    """verl's asynchronous 7B run on some GPUs, half of which sample, next to one that takes turns on all.

    Source: docs/advance/fully_async.md of verl, Qwen2.5-Math-7B on H20, DAPO, up to 28k tokens.

    Attributes:
        response: Mean length for which the update of the run in turn is predicted to take what it took.
        in_turn, update_in_turn: Seconds of a step and its update.
        step, wait, update: The same of the asynchronous run, and how long training waited.
    """

    gpus: int
    response: float
    in_turn: float
    update_in_turn: float
    step: float
    wait: float
    update: float


STREAMS = (
    PublishedStream(32, 1940, 790.1, 313.81, 294.77, 21.26, 269.80),
    PublishedStream(64, 1640, 365.28, 133.41, 189.26, 28.46, 156.98),
    PublishedStream(128, 2750, 356.3, 113.81, 150.63, 33.14, 113.16),
)
DAPO = [
    *("worker.actor.share_prompt=false", "worker.actor.dynamic_batching=true", "algorithm.disable_kl=true"),
    *("data.rollout_batch_size=512", "worker.rollout.n=16", "worker.actor.global_batch_size=32"),
    *("data.max_prompt_length=2048", "data.max_response_length=28672", "worker.actor.ulysses_size=4"),
    *("worker.rollout.tensor_parallel_size=1", "trainer.save_freq=-1"),
    *("worker.hybrid_engine=false", "trainer.async.mode=stream", "trainer.async.staleness_threshold=2"),
]
PROMPT = 200  # tokens, about
SIMULATED_ENGINES, SIMULATED_STEPS = 4, 10


def config_of(run: Published, folder: Path) -> PPOConfig:
    """Load a run's options over examples/config.yaml, with its model in a folder."""
    model = folder / run.model
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[run.model]))
    return load_config(
        PPOConfig,
        [
            f"config={ROOT / 'examples' / 'config.yaml'}",
            f"worker.actor.model.model_path={model}",
            *cluster_of(run).options,
            *SWITCHES,
            *run.options,
        ],
    )


def cluster_of(run: Published) -> Cluster:
    return parse_cluster(run.cluster)


def predicted(run: Published, folder: Path) -> StepTime:
    cluster, config = cluster_of(run), config_of(run, folder)
    return Predictor(make_planner(planned_ppo, cluster.machine), cluster, run.prompt, run.response)(config)


def seconds_of(step: StepTime, phase: str) -> float:
    """Seconds of a phase as its source counts them."""
    if phase == "step":
        return step.seconds
    together = ("gen", "sync_weights") if phase == "gen" else (phase,)
    return sum(step.phase(name).seconds for name in together)


def needed_gib(method: str, size: str, gpus: int, memory: int, folder: Path) -> tuple[float, float]:
    """Return what the plan of EasyR1's settings takes of a GPU at its most, and what the GPU has to use.

    One row at a time; an engine as large as its weights, which the ranks of a node share, and 4 GiB.
    """
    model = folder / f"Qwen2.5-{size}"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODELS[model.name]))
    nodes, in_node = max(1, gpus // 8), min(gpus, 8)
    weights = 2 * float(size.removesuffix("B")) * 1e9 / 2**30 / in_node
    options = [
        f"config={ROOT / 'examples' / 'config.yaml'}",
        f"worker.actor.model.model_path={model}",
        *("trainer.device=cuda", f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={in_node}"),
        f"worker.rollout.tensor_parallel_size={in_node}",
        f"worker.rollout.gpu_memory_utilization={min(0.8, (weights + 4) / memory):.3f}",
        "worker.actor.micro_batch_size_per_device_for_experience=1",
        *SWITCHES,
        *METHODS[method],
    ]
    machine = Machine("cuda", memory * GIB, 2048 * GIB, "a GPU")
    plan = make_planner(planned_ppo, machine)(load_config(PPOConfig, options))
    most = max(phase.device_bytes for phase in plan.phases)
    return most / GIB, machine.usable_device / GIB


def hardware_lines(folder: Path) -> list[str]:
    """Return the rows of the table of memory."""
    rows = []
    for method, sizes in HARDWARE.items():
        for size, (gpus, memory) in sizes.items():
            taken, usable = needed_gib(method, size, gpus, memory, folder)
            fits = "fits" if taken <= usable else "does not fit"
            rows.append(
                f"| {method} | {size} | {gpus} x {memory} GB | {taken:.1f} of {usable:.1f} | {fits} |"
            )
    return rows


def stream_lines(folder: Path) -> list[str]:
    """Return the rows of the table of streams."""
    return [stream_line(published, folder) for published in STREAMS]


def stream_line(published: PublishedStream, folder: Path) -> str:
    half = published.gpus // 2
    options = [*DAPO, f"trainer.n_gpus_for_rollout={half}"]
    run = Published(VERL, "Qwen2.5-7B", f"{half // 8}x8xH20", options, PROMPT, published.response, {})
    cluster, config = cluster_of(run), config_of(run, folder)
    predict = Predictor(make_planner(planned_ppo, cluster.machine), cluster, run.prompt, run.response)
    engine = predict.plan.describe(config).engine
    assert engine is not None, "the run samples"
    costs, rest = predicted_costs(config, predict, engine), predict(config).phase("controller").seconds
    rollout = config.worker.rollout

    def simulated(update: float, share: int) -> tuple[float, float]:
        """Seconds of a step and of its wait, with a share of the responses that an engine has room for."""
        work = SimulatedWork(
            config.data.rollout_batch_size * SIMULATED_ENGINES // half,
            rollout.n,
            PROMPT,
            drawn_lengths(predict.lengths(config).responses).__next__,
            SIMULATED_STEPS,
        )
        run = simulate(
            "stream",
            work,
            replace(costs, training=update + rest),
            engines=SIMULATED_ENGINES,
            staleness=config.trainer.async_training.staleness_threshold,
            max_in_flight=rollout.sequences_at_once(on_gpu=True) // rollout.n // share,
            warm_up=SIMULATED_STEPS,
        )
        return run.seconds / SIMULATED_STEPS, run.idle_training * run.seconds / SIMULATED_STEPS

    step, wait = min(simulated(published.update, share) for share in (1, 2, 4))
    equal, _ = min(simulated(2 * published.update_in_turn, share) for share in (1, 2, 4))
    return (
        f"| {half} + {half} | {published.in_turn:.0f} | {published.step:.0f} |"
        f" {published.in_turn / published.step:.2f} | {published.wait:.0f} | {step:.0f} |"
        f" {published.in_turn / step:.2f} | {wait:.0f} | {published.in_turn / equal:.2f} |"
    )


def lines(folder: Path) -> list[str]:
    """Return the rows of the table."""
    rows = []
    for run in RUNS:
        step = predicted(run, folder)
        name = f"{run.source} | {run.model}, {run.setting} | {run.cluster}"
        for phase, published in run.seconds.items():
            ours = seconds_of(step, phase)
            rows.append(
                f"| {name} | `{phase}`, s | {published:.0f} | {ours:.0f} | {ours / published:.2f} |"
                if published >= 10
                else f"| {name} | `{phase}`, s | {published:.1f} | {ours:.1f} | {ours / published:.2f} |"
            )
        if run.mfu is not None:
            ours = 100 * step.mfu["update_actor"]
            rows.append(f"| {name} | update, MFU % | {run.mfu:.0f} | {ours:.0f} | {ours / run.mfu:.2f} |")
    return rows


def main() -> None:
    repair_cuda_builds()
    with tempfile.TemporaryDirectory() as folder:
        tables = (lines(Path(folder)), stream_lines(Path(folder)), hardware_lines(Path(folder)))
        sys.stdout.write("\n\n".join("\n".join(table) for table in tables) + "\n")


if __name__ == "__main__":
    main()
