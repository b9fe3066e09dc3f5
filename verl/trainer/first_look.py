# SPDX-License-Identifier: Apache-2.0
"""First look of a run, a dry run and `data_check` at rows and templates, before torch is imported."""

from collections.abc import Mapping

from verl.config.data import DataConfig
from verl.config.reward_servers import RewardServerConfig
from verl.config.sft import SFTDataConfig, SFTWorkerConfig
from verl.config.worker import WorkerConfig

Servers = Mapping[str, RewardServerConfig]


def look_at_prompts(
    data: DataConfig,
    worker: WorkerConfig,
    servers: Servers | None = None,
    *,
    checks_rows: bool = True,
    makes_text: bool = True,
) -> list[str]:
    """Look at the prompts of a run and its reward function; return notes, or raise what would end it.

    Without `checks_rows` only columns and templates are looked at, see `look_at_data`. Without `makes_text`
    the function is loaded and not called: pictures need torch.
    """
    # Imported here so that `--help` and a wrong config need none of it.
    from verl.data.first_look import PROMPT_ROWS, look_at_data  # noqa: PLC0415
    from verl.rewards.servers import specs_of  # noqa: PLC0415
    from verl.trainer.reward_trial import look_at_reward  # noqa: PLC0415

    look = look_at_data(PROMPT_ROWS, data, worker.actor.model.tokenizer_path, checks_rows=checks_rows)
    if checks_rows:
        converses = worker.rollout.multi_turn.enable
        rows = look.rows if makes_text else []
        look_at_reward(rows, data, worker.scoring, specs_of(servers or {}), converses=converses)
    return look.notes


def look_at_conversations(
    data: SFTDataConfig, worker: SFTWorkerConfig, *, checks_rows: bool = True
) -> list[str]:
    """Look at the conversations of a run; see `look_at_prompts`."""
    from verl.data.first_look import CONVERSATION_ROWS, look_at_data  # noqa: PLC0415

    path = worker.actor.model.tokenizer_path
    return look_at_data(CONVERSATION_ROWS, data, path, checks_rows=checks_rows).notes
