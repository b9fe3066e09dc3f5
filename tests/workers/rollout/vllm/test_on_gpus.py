# SPDX-License-Identifier: Apache-2.0
"""Arguments, environment and calls of the vLLM engine on a GPU, as far as they can be checked without one."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.workers.rollout.reference import rollout_config, setup_of
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.interface import RolloutEngine, RolloutRequest, SamplingOptions
from verl.workers.rollout.vllm import llm_arguments, sleep_mode, vllm_import
from verl.workers.rollout.vllm.engine_requests import check_sampling
from verl.workers.rollout.vllm.expert_sync import JointExperts
from verl.workers.rollout.vllm.llm_arguments import engine_arguments
from verl.workers.rollout.vllm.rollout import VLLMRollout


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    vllm_import.set_environment("cpu")  # before vLLM is imported
    return {
        family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in ("qwen2", "qwen3_vl")
    }


def arguments_for(path, device="cuda", override_config=None, **options):
    setup = dataclasses.replace(setup_of(path, override_config=override_config or {}), device=device)
    return engine_arguments(rollout_config(**options), setup, AutoConfig.from_pretrained(path))


def source_of(module):
    # not imported: the runner of GPUs needs Triton
    spec = importlib.util.find_spec("vllm")
    return (Path(spec.origin).parent / module).read_text()


@pytest.mark.parametrize("name", ["VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"])
def test_flashinfer_is_off_on_gpus_unless_the_user_turns_it_on(name, monkeypatch):
    for device, given, expected in (("cuda", None, "0"), ("cuda", "1", "1"), ("cpu", None, None)):
        environ = {} if given is None else {name: given}
        monkeypatch.setattr(vllm_import.os, "environ", environ)

        vllm_import.set_environment(device)

        assert environ.get(name) == expected
        assert "VLLM_USE_V2_MODEL_RUNNER" not in environ


def test_tensor_parallel_engines_do_not_fuse_the_all_reduce(paths):
    alone = arguments_for(paths["qwen2"])
    parallel = arguments_for(paths["qwen2"], tensor_parallel_size=2)

    assert "compilation_config" not in alone
    assert parallel["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    from vllm.config.compilation import PassConfig

    assert "fuse_allreduce_rms" in {field.name for field in dataclasses.fields(PassConfig)}


def test_vllm_knows_every_argument(paths):
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}

    for device in ("cuda", "cpu"):
        for family in paths:
            assert set(arguments_for(paths[family], device, tensor_parallel_size=2)) <= known


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl"])
def test_the_engines_head_is_float32_on_gpus_and_in_the_weights_dtype_on_cpu(family, paths):
    # on CPU the trainer rounds logits to its dtype too
    config = AutoConfig.from_pretrained(paths[family])

    overridden = arguments_for(paths[family])["hf_overrides"](config)

    assert overridden.head_dtype == overridden.get_text_config().head_dtype == "float32"
    assert "hf_overrides" not in arguments_for(paths[family], "cpu")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_overrides_apply_to_the_model_and_not_to_the_config_that_asks_for_a_model_type(device, paths):
    override = arguments_for(paths["qwen2"], device, {"rms_norm_eps": 0.5})["hf_overrides"]
    dummy = PreTrainedConfig(architectures=[""], model_type="dummy_qwen2")

    assert override(AutoConfig.from_pretrained(paths["qwen2"])).rms_norm_eps == 0.5
    assert override(dummy).model_type == "dummy_qwen2"


def test_sequences_at_once_have_a_default_for_each_device_and_an_option(paths):
    path = paths["qwen2"]

    assert arguments_for(path)["max_num_seqs"] == 512
    assert arguments_for(path, "cpu")["max_num_seqs"] == 256
    assert arguments_for(path, max_num_seqs=40)["max_num_seqs"] == 40
    # vLLM refuses more sequences than tokens in a step
    assert arguments_for(path, max_num_batched_tokens=100)["max_num_seqs"] == 100


def test_graphs_leave_the_gpu_during_sleep_where_vllm_can_move_them(paths, monkeypatch):
    assert arguments_for(paths["qwen2"])["enable_sleep_mode"]
    assert arguments_for(paths["qwen2"])["sleep_mode_offload_cudagraph"]

    older = dataclasses.make_dataclass("EngineArgs", ["model"])
    monkeypatch.setattr(llm_arguments.importlib, "import_module", lambda _: SimpleNamespace(EngineArgs=older))

    assert llm_arguments.known_arguments(model="", sleep_mode_offload_cudagraph=True) == {"model": ""}


class RecordingVllm:
    """Records the calls of vLLM and of torch's allocator, in order."""

    def __init__(self):
        self.calls = []
        core = SimpleNamespace(batch_queue=[], scheduler=SimpleNamespace(has_requests=lambda: False))
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=core),
            reset_prefix_cache=lambda: True,
            reset_encoder_cache=lambda: None,
        )

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")


def engine_on_gpu(monkeypatch, level):
    """An engine whose vLLM is recorded; only sleeping, waking and syncing work."""
    engine = VLLMRollout.__new__(VLLMRollout)
    RolloutEngine.__init__(engine)
    engine.llm = RecordingVllm()
    engine.engine = engine.llm.llm_engine
    engine.device, engine.dtype, engine.level = "cuda", torch.float32, level
    engine.keeps_weights = level == sleep_mode.KEPT
    engine.hf_config = SimpleNamespace(model_type="qwen2", tie_word_embeddings=False)
    layers = {"visual": torch.nn.Linear(2, 2, bias=False), "head": torch.nn.Linear(2, 2)}
    engine.model = torch.nn.ModuleDict(layers)
    engine.model.load_weights = lambda weights: [name for name, _ in weights]
    engine.experts = JointExperts(engine.model, engine.hf_config)
    engine.runner = SimpleNamespace()
    engine.asleep, engine.synced = set(), False
    engine.tower, engine.frozen_parts = set(), ("visual",)
    calls = engine.llm.calls
    monkeypatch.setattr(sleep_mode.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(sleep_mode, "empty_cache", lambda device: calls.append(f"empty {device}"))
    return engine, calls


def test_torchs_cache_is_given_back_before_the_engine_takes_its_memory(monkeypatch):
    engine, calls = engine_on_gpu(monkeypatch, level=2)

    engine.sleep()
    engine.sync_weights(engine.model.state_dict().items())
    engine.wake()

    released = ["collect", "empty cuda"]
    assert calls == ["sleep 2", *released, "wake weights", *released, "wake kv_cache"]


def test_discarded_weights_must_be_synced_before_the_next_rollout(monkeypatch):
    engine, _ = engine_on_gpu(monkeypatch, level=2)
    engine.sync_weights(engine.model.state_dict().items())

    engine.sleep()

    engine.wake()
    with pytest.raises(AssertionError, match="synced before a rollout"):
        next(engine.generate([RolloutRequest("a", [1])], SamplingOptions()))
    with pytest.raises(RuntimeError, match=r"did not reach parameters .*'visual\.weight'"):
        engine.sync_weights(engine.model["head"].state_dict(prefix="head.").items())


def test_kept_weights_need_no_sync_after_sleep(monkeypatch):
    engine, calls = engine_on_gpu(monkeypatch, level=1)
    engine.sync_weights(engine.model.state_dict().items())

    engine.sleep()
    engine.sync_weights(engine.model["head"].state_dict(prefix="head.").items())

    assert engine.synced
    with pytest.raises(RuntimeError, match=r"did not reach parameters .*'head\.bias'"):
        engine.sync_weights([("head.weight", engine.model["head"].weight)])
    assert calls[0] == "sleep 1"


def runner_with(state):
    return SimpleNamespace(model_state=state)


def make_state(name="DefaultModelState", module="vllm.v1.worker.gpu.model_states.default", **values):
    state = type(name, (), {"__module__": module})()
    vars(state).update(values)
    return state


def test_the_weights_are_kept_where_a_sync_does_not_bring_everything_back():
    assert sleep_mode.sleep_level(SimpleNamespace(), takes_adapter=False) == 2  # the V1 runner
    assert sleep_mode.sleep_level(runner_with(make_state()), takes_adapter=False) == 2
    assert sleep_mode.sleep_level(runner_with(make_state()), takes_adapter=True) == 1
    assert sleep_mode.sleep_level(runner_with(make_state()), takes_adapter=False, is_quantized=True) == 1
    assert sleep_mode.sleep_level(runner_with(make_state("MambaHybridModelState")), takes_adapter=False) == 1


def test_tensors_that_are_neither_parameters_nor_buffers_survive_discarded_weights(monkeypatch):
    engine, _ = engine_on_gpu(monkeypatch, level=2)
    head = engine.model["head"]
    head.scale, head.kv_cache = torch.full((2,), 3.0), torch.full((2,), 4.0)
    head.register_buffer("table", torch.full((2,), 5.0))
    monkeypatch.setattr(sleep_mode, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    engine.sleep()
    assert len(engine.copies) == 1  # the cache is empty after waking, and vLLM restores buffers
    for tensor in (head.scale, head.kv_cache, head.table):
        tensor.fill_(torch.nan)  # as discarded memory may

    engine.wake()

    assert head.scale.tolist() == [3.0, 3.0]


def test_positions_of_unused_slots_are_zero_after_the_weights_were_discarded(monkeypatch):
    positions = torch.full((3, 5), 2**40)
    rope = make_state("RopeState", "vllm.v1.worker.gpu.mm.rope", positions=positions)
    module = torch.nn.Linear(2, 2)
    state = make_state(rope_state=rope, model=module, other=None)
    rope.owner = state  # a cycle
    engine, _ = engine_on_gpu(monkeypatch, level=2)
    engine.runner = runner_with(state)
    engine.sleep()

    engine.wake()

    assert not positions.any()
    assert module.weight.any()


def test_vllms_state_of_positions_is_where_it_is_cleared():
    assert "class DefaultModelState(" in source_of("v1/worker/gpu/model_states/default.py")
    assert "self.rope_state = get_rope_state(" in source_of("v1/worker/gpu/model_states/default.py")
    assert re.search(r"self\.positions = torch\.zeros\(", source_of("v1/worker/gpu/mm/rope.py"))
    assert "self.model_state = init_model_state(" in source_of("v1/worker/gpu/model_runner.py")


def test_sampling_on_shards_of_the_batch_is_refused_by_name():
    def config(**options):
        return SimpleNamespace(parallel_config=SimpleNamespace(**options))

    check_sampling(config())  # vLLM 0.26
    check_sampling(config(enable_batch_sharded_sampling=False))
    with pytest.raises(RuntimeError, match="`enable_batch_sharded_sampling` is on"):
        check_sampling(config(enable_batch_sharded_sampling=True))


def test_the_runner_of_gpus_takes_logits_and_seeds_from_where_this_project_replaces_them():
    runner = source_of("v1/worker/gpu/model_runner.py")
    seeds = source_of("v1/worker/gpu/sample/states.py")

    # `scale_logits` replaces the method of the module; the other way to logits is that of sharded batches
    assert "self.model.compute_logits(" in runner
    others = set(re.findall(r"self\.model\.(compute_logits\w*)\(", runner)) - {"compute_logits"}
    assert others <= {"compute_logits_local"}
    # `GenerationRng` swaps numpy's global stream
    assert "np.random.randint(" in seeds
    assert "torch.Generator" not in seeds and "default_rng" not in seeds


def test_an_engine_takes_the_current_gpu(monkeypatch):
    environ = {"LOCAL_RANK": "3"}
    monkeypatch.setattr(vllm_import.os, "environ", environ)
    monkeypatch.setattr(
        vllm_import.torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 0)
    )

    vllm_import.choose_device("cpu")
    assert environ == {"LOCAL_RANK": "3"}
    vllm_import.choose_device("cuda")
    assert environ == {"LOCAL_RANK": "0"}
