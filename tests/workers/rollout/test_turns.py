# SPDX-License-Identifier: Apache-2.0
"""Conversations of two turns with an image in the answer between them, by both engines."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoProcessor

from tests.helpers.distributed import run_distributed
from tests.workers.rollout.media import picture
from tests.workers.rollout.reference import (
    change_weights,
    collect,
    engine_params,
    hub_tensors,
    load_model,
    reference_log_probs,
    rollout_config,
    setup_of,
)
from verl.data.media.decoded import DecodedMedia, media_in_order, shape_of
from verl.models.families.registry import family_of
from verl.models.families.tiny_sizes import TinyModel
from verl.models.tiny import save_tiny_model
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import RolloutRequest, SamplingOptions
from verl.workers.rollout.vllm.llm_arguments import CPU_BLOCK

pytestmark = pytest.mark.heavy

OPTIONS = SamplingOptions(temperature=0.7, max_tokens=20, ignore_eos=True)
QUESTIONS = {
    "text": ("What colour is the shape?", []),
    "image": (f"{TinyModel.image}What colour is the shape?", [1]),
    "images": (f"{TinyModel.image}or{TinyModel.image}: what colour is the shape?", [1, 2]),
}
ANSWER = f"<|im_end|>\n<|im_start|>user\nLook {TinyModel.image} closer.<|im_end|>\n<|im_start|>assistant\n"


def first_turn(tokenizer, uid):
    text, pictures = QUESTIONS[uid]
    return RolloutRequest(uid, tokenizer.encode(text), DecodedMedia([picture(seed) for seed in pictures]))


def second_turn(tokenizer, request, response):
    """The conversation after a tool's answer with an image; the engine's tokens stay as they are."""
    images = [*request.media.images, picture(len(request.media.images) + 7, 120, 60)]
    ids = [*request.prompt_token_ids, *response.token_ids, *tokenizer.encode(ANSWER)]
    return replace(request, prompt_token_ids=ids, media=DecodedMedia(images), max_tokens=9)


def converse(engine, tokenizer, uids):
    """Both turns of several conversations: the second ones are submitted as soon as the first ones end."""
    requests = {uid: [first_turn(tokenizer, uid)] for uid in uids}
    responses = {uid: [] for uid in uids}
    for place, (request,) in enumerate(requests.values()):  # no two end in the same step
        engine.submit([replace(request, max_tokens=20 + 3 * place)], OPTIONS)
    while engine.num_unfinished:
        for response in engine.step():
            responses[response.uid].append(response)
            if len(responses[response.uid]) == 1:
                turn = second_turn(tokenizer, requests[response.uid][0], response)
                requests[response.uid].append(turn)
                engine.submit([turn], OPTIONS)
    return requests, responses


@torch.no_grad()
def row_log_probs(model, processor, request, response_ids, temperature):
    """The log-probs of all tokens but the first of a whole row, and its ids, by one float32 forward."""
    family, raw = family_of(model.config), request.prompt_token_ids
    shape = shape_of(family, processor, request.media)
    ids = [*family.expand(processor, raw, shape), *response_ids]
    media = media_in_order(family, processor, raw, request.media, shape)
    positions = family.positions(model.config, torch.tensor(ids), shape)
    log_probs = reference_log_probs(
        model, ids[:1], ids[1:], temperature, position_ids=positions[:, None],
        **family.own_inputs(media), **family.own_arguments(model.config, torch.tensor(ids)[None]),
    )  # fmt: skip
    return log_probs, ids


def expanded(model, processor, request):
    family = family_of(model.config)
    return family.expand(processor, request.prompt_token_ids, shape_of(family, processor, request.media))


def turn_differences(model, processor, requests, responses):
    """The largest differences of both turns' log-probs from the row's."""
    (before, last), (first, second) = requests, responses
    log_probs, ids = row_log_probs(model, processor, last, second.token_ids, OPTIONS.temperature)
    prompt = expanded(model, processor, before)
    assert ids[: len(prompt) + len(first.token_ids)] == [*prompt, *first.token_ids]
    places = (len(prompt), first), (len(ids) - len(second.token_ids), second)
    return [
        (log_probs[start - 1 :][: len(turn.token_ids)] - torch.tensor(turn.log_probs)).abs().max().item()
        for start, turn in places
    ]


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")
    model = load_model(path)
    change_weights(model, seed=1)
    return path, model, AutoProcessor.from_pretrained(path)


@pytest.fixture(scope="module", params=engine_params("hf", "vllm", "sglang"))
def engine(request, qwen2_5_vl, single_process):
    path, model, _ = qwen2_5_vl
    engine = build_rollout_engine(rollout_config(name=request.param), setup_of(path))
    engine.sync_weights(hub_tensors(model))
    yield engine
    engine.close()


@pytest.mark.nightly
def test_both_turns_have_the_log_probs_of_the_whole_row(engine, qwen2_5_vl):
    _, model, processor = qwen2_5_vl

    requests, responses = converse(engine, processor.tokenizer, QUESTIONS)

    for place, uid in enumerate(QUESTIONS):
        assert [len(response.token_ids) for response in responses[uid]] == [20 + 3 * place, 9]
        differences = turn_differences(model, processor, requests[uid], responses[uid])
        assert max(differences) < 1e-4, (uid, differences)


@pytest.mark.nightly
def test_a_second_turn_reads_the_first_ones_tokens_from_the_prefix_cache(qwen2_5_vl, single_process):
    path, model, processor = qwen2_5_vl
    engine = build_rollout_engine(rollout_config(), setup_of(path))
    engine.sync_weights(hub_tensors(model))
    cached = {}
    step = engine.engine.step

    def noted_step():
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs if output.finished})
        return outputs

    engine.engine.step = noted_step
    options = replace(OPTIONS, max_tokens=60)
    request = first_turn(processor.tokenizer, "image")
    opening = [*range(40, 130)]
    request = replace(request, prompt_token_ids=[*opening, *request.prompt_token_ids])
    # tokens whose keys and values the first turn computes: those of the last one it samples are not
    length = len(expanded(model, processor, request)) + options.max_tokens - 1
    [first] = collect(engine, [request], options).values()
    turn = second_turn(processor.tokenizer, request, first)
    [second] = collect(engine, [turn], options).values()
    other = replace(turn, media=DecodedMedia([picture(30), *turn.media.images[1:]]))
    collect(engine, [other], options)
    differences = turn_differences(model, processor, [request, turn], [first, second])
    engine.sync_weights(hub_tensors(model))
    collect(engine, [turn], options)
    engine.close()

    # Whole blocks. Those that reach another image have other keys and values, and so has every block under
    # other weights.
    shared = [(tokens // CPU_BLOCK) * CPU_BLOCK for tokens in (length, len(opening))]
    assert list(cached.values()) == [0, *shared, 0]
    assert max(differences) < 1e-4


def converse_in_parallel(rank, world_size, path):
    """Return what an abort leaves, the tokens of one rank, and its largest difference of log-probs."""
    engine = build_rollout_engine(rollout_config(tensor_parallel_size=2), setup_of(path))
    model, processor = load_model(path), AutoProcessor.from_pretrained(path)
    change_weights(model, seed=2)
    engine.sync_weights(hub_tensors(model))
    torch.rand(rank + 1)  # ranks train on different data
    engine.submit([RolloutRequest("leaves", [50, 51, 52])], OPTIONS)
    for _ in range(3):
        engine.step()
    engine.submit([RolloutRequest("stays", [60, 61])], replace(OPTIONS, n=2))
    engine.abort(["leaves"])
    left = engine.num_unfinished
    while engine.num_unfinished:
        engine.step()
    requests, responses = converse(engine, processor.tokenizer, QUESTIONS)
    differences = [turn_differences(model, processor, requests[uid], responses[uid]) for uid in QUESTIONS]
    engine.close()
    tokens = {uid: [response.token_ids for response in turns] for uid, turns in responses.items()}
    return left, tokens, max(map(max, differences))


@pytest.mark.slow  # two more engines; test_environments.py has them in every suite
def test_ranks_of_a_tensor_parallel_engine_have_the_same_conversations(tmp_path):
    path = save_tiny_model(tmp_path, "qwen2_5_vl")

    (left, tokens, difference), (other_left, other_tokens, other_difference) = run_distributed(
        converse_in_parallel, 2, path
    )

    assert left == other_left == 2
    assert tokens == other_tokens
    assert max(difference, other_difference) < 1e-4
