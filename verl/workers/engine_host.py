# SPDX-License-Identifier: Apache-2.0
"""A rollout engine in its process, with its conversations."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from verl.agents.setup import conversation_rules, endpoint_of
from verl.agents.tools.tool_pool import ToolPool
from verl.batch_keys import BEGUN
from verl.config.worker import WorkerConfig
from verl.data.media.decoded import DecodedMedia
from verl.data.media.loader import MediaLoader
from verl.data.media.references import MediaData
from verl.data.readers import Readers
from verl.distributed.device import is_gpu
from verl.models.families.registry import is_named, media_family_of
from verl.models.hub_names import meta_model
from verl.models.layer_configs import experts_per_layer
from verl.models.mixture.routing import replay_obstacle
from verl.protocol import DataProto
from verl.workers.continued_sampling import ContinuedSampling
from verl.workers.conversations.agent_driver import AgentDriver
from verl.workers.conversations.agent_leader import AgentLeader
from verl.workers.conversations.driver import ConversationDriver
from verl.workers.engine_check import SampledRow, check_requests, refusing_engine, sample
from verl.workers.packing.vision_features import FrozenTower
from verl.workers.rollout.engines import build_rollout_engine
from verl.workers.rollout.interface import (
    EmbeddedMedia,
    EngineAdapter,
    EngineSetup,
    FinishedResponse,
    RolloutRequest,
    SamplingOptions,
)
from verl.workers.rollout.processed_media import PendingMedia, ProcessedMedia
from verl.workers.run_options import RunOptions

NOT_FOUND = (
    "features of a prompt's media are not in the cache of this node: it needs room for those of a step; make"
    " `data.rollout_batch_size` smaller or /dev/shm larger, and with several nodes let the number of prompts"
    " be a multiple of theirs"
)


class EnginePlace(NamedTuple):
    """The place of a rank among the processes that sample."""

    engine: int  # number of the engine, which a tensor-parallel group shares
    leads: bool  # the first rank of its engine, which runs the tools


class EngineHost:
    """Builds the engine of a rank, and samples with it."""

    def __init__(
        self,
        config: WorkerConfig,
        options: RunOptions,
        place: EnginePlace,
        tokenizer: Any,
        media: MediaLoader | None,
        model_config: Any,
        *,
        tower: FrozenTower | None = None,  # encodes media for the engine, if it takes features
        adapter: EngineAdapter | None = None,  # synced instead of whole weights
    ) -> None:
        self.config, self.options, self.place = config, options, place
        self.tokenizer, self.media, self.model_config, self.tower = tokenizer, media, model_config, tower
        self.processed = None if media is None else ProcessedMedia(media)
        # no one has compared the engine for a model without a file of its family
        self.must_be_compared = media is not None and not is_named(model_config)
        with refusing_engine(config.rollout.name, self.must_be_compared):
            self.engine = build_rollout_engine(config.rollout, self._setup(adapter))
        if self.engine.embeds_prompts:
            self._check_embedding()
        self.continued = ContinuedSampling(self.engine)
        self.conversations = self._conversation_driver()
        self.joining = self.conversations or self.continued  # takes prompts at any time

    def generate(self, prompts: DataProto, sampling: SamplingOptions) -> Iterator[list[FinishedResponse]]:
        """Sample responses to prompts (`raw_prompt_ids`, `multi_modal_data`) and yield them as they finish.

        With tools, a response is a whole conversation; they read every column.
        """
        before = self.engine.rng_state() if sampling.is_apart else None
        if self.conversations is not None:
            yield from self.conversations.run(_rows(prompts), sampling)
        else:
            yield from self.engine.generate(self._requests(prompts), sampling)
        if before is not None:
            self.engine.set_rng_state(before)

    def sample(
        self, prompts: DataProto | None, sampling: SamplingOptions, at_most: int
    ) -> list[FinishedResponse]:
        """Add prompts to those being sampled, and run at most `at_most` engine steps.

        Returns the responses that are finished then. Prompts with a column `BEGUN` continue its responses.
        """
        if prompts is not None:
            uids = prompts.non_tensor_batch["uid"]
            begun = dict(zip(uids, prompts.non_tensor_batch.get(BEGUN, ()), strict=False))
            if self.conversations is not None:
                self.conversations.submit(_rows(prompts), sampling, begun)
            else:
                self.continued.submit(self._requests(prompts), sampling, begun)
        return self.joining.step(at_most)

    def rows_to_compare(self) -> list[SampledRow]:
        """Sample responses for the trainer to compare log-probs, for a model without a family of its own.

        Collective over all ranks, with the policy on its device, if its tower encodes media for the engine.
        """
        assert self.media is not None, "the model reads media"
        rollout = self.config.rollout
        requests = check_requests(self.media, self.tokenizer, self._longest, rollout.limit_images)
        return sample(self.engine, requests, self.media, None if self.tower is None else self.tower.run)

    def _requests(self, prompts: DataProto) -> list[RolloutRequest]:
        columns = (prompts.non_tensor_batch[key] for key in ("uid", "raw_prompt_ids", "multi_modal_data"))
        return [
            RolloutRequest(uid, self._ids_of(ids, media), self._media_of(media))
            for uid, ids, media in zip(*columns, strict=True)
        ]

    def _ids_of(self, ids: list[int], media: MediaData) -> list[int]:
        if not media or not self.engine.embeds_prompts:
            return ids
        assert self.media is not None, "the loader rejects media for a model without a processor"
        return self.media.expand(list(ids), self.media.measure(media))

    def _media_of(self, media: MediaData) -> PendingMedia | EmbeddedMedia | None:
        # features of a frozen tower, or pixels
        if not media:
            return None
        takes_features = self.tower is not None and self.engine.takes_embeddings
        if takes_features and media.get("videos"):
            takes_features = media_family_of(self.model_config).takes_video_features
        if takes_features:
            assert self.tower is not None
            known = self.tower.known(media)  # None if the cache had no room for it
            if known is not None:
                return EmbeddedMedia(known["image"], known["video"], known["audio"])
            if self.engine.embeds_prompts:
                raise RuntimeError(NOT_FOUND)
        assert self.processed is not None, "the loader rejects media for a model without a processor"
        return self.processed.begin(media)

    def _media_of_turn(self, media: MediaData) -> DecodedMedia | EmbeddedMedia | None:
        given = self._media_of(media)
        return given.result() if isinstance(given, PendingMedia) else given

    def _check_embedding(self) -> None:
        kind = self.model_config.model_type
        if self.config.rollout.multi_turn.enable:
            raise ValueError(
                f"`worker.rollout.multi_turn.enable` must be false for {kind}: its rollout engine reads media"
                " that the policy encodes before it samples; use a model that vLLM knows, or"
                " `worker.rollout.name=hf`"
            )
        if self.media is not None and self.tower is None:
            raise ValueError(
                f"`worker.hybrid_engine` must be true for {kind}: its rollout engine reads media that the"
                " policy encodes, so it must be in the processes that train; or set `worker.rollout.name=hf`"
            )

    def _conversation_driver(self) -> ConversationDriver | AgentDriver | None:
        multi_turn, config, positions = self.config.rollout.multi_turn, self.model_config, None
        if not multi_turn.enable:
            return None
        if self.media is not None:
            positions = partial(media_family_of(config).positions, config)
        options = self.options
        rules = conversation_rules(
            Readers(self.tokenizer, None, self.media, positions, options.tools),
            multi_turn,
            max_tokens=options.max_response_length,
            max_prompt_tokens=options.max_prompt_length,
            max_prompt_images=self.config.rollout.limit_images,
            template_variables=options.template_variables,
            override_chat_template=options.override_chat_template,
        )
        pool = ToolPool(multi_turn) if self.place.leads else None
        if multi_turn.agent is None:
            return ConversationDriver(
                self.continued, pool, rules, self._media_of, in_lockstep=options.in_lockstep
            )
        leader = None
        if pool is not None:
            leader = AgentLeader(pool, endpoint_of(rules, on_call=pool.hold), rules, self._media_of_turn)
        return AgentDriver(self.continued, leader, self._media_of_turn)

    @property
    def _longest(self) -> int:
        options = self.options
        return self.config.rollout.longest_sequence(options.max_prompt_length, options.max_response_length)

    def _setup(self, adapter: EngineAdapter | None) -> EngineSetup:
        model = self.config.actor.model
        assert model.model_path is not None, "required when the config was checked"
        return EngineSetup(
            model_path=model.model_path,
            max_length=self._longest,
            device=self.options.device,
            dp_rank=self.place.engine,
            tokenizer_path=model.tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            takes_embeddings=self.tower is not None,
            adapter=adapter,
            records_routes=self._records_routes(),
            media=self.processed,
        )

    def _records_routes(self) -> bool:
        # by hooks they cost nothing that is felt; on GPUs vLLM copies them to the host at every step
        actor, config = self.config.actor, self.model_config
        if actor.router_replay == "r3":
            return True
        if self.config.rollout.name != "hf" and is_gpu(self.options.device):
            return False
        if not experts_per_layer(config.get_text_config()):
            return False
        return replay_obstacle(meta_model(config, None, actor.model.trust_remote_code)) is None


def _rows(prompts: DataProto) -> list[dict[str, Any]]:
    """Return the columns of each prompt, which tools may read."""
    rows = [prompts[row].non_tensor_batch for row in range(len(prompts))]
    return [{key: value for key, value in row.items() if key != BEGUN} for row in rows]
