# SPDX-License-Identifier: Apache-2.0
"""Extensions are called on tiny inputs before a run, and an error names file, line, function and rule."""

import textwrap
from contextlib import nullcontext

import pytest

from tests.helpers.extensions import minimal_arguments
from tests.helpers.fine_tuning import arguments_for, write_conversations
from verl.config.ppo import PPOConfig
from verl.config.schema import load_config, walk_options
from verl.config.sft import SFTConfig
from verl.models.families.registry import TYPES
from verl.models.tiny import save_tiny_model
from verl.trainer.extensions.checks import KINDS, check_extensions
from verl.trainer.extensions.protocol import extensions_in

HEAD = """\
import torch
from verl.algorithms.advantage_types import Advantages
from verl.algorithms.policy_loss_types import PolicyLoss, policy_loss, policy_terms
from verl.data.order import RowSampler
from verl.logger.base import Logger
from verl.models.families.interface import Family
from verl.models.families.qwen_vl import QwenVL
from verl.utils.registry import needs

"""
STATELESS = """
    def state_dict(self): return {}
    def load_state_dict(self, state): ...
"""
OPTIONS = {
    "estimator": "algorithm.adv_estimator",
    "loss": "worker.actor.loss_type",
    "kl": "algorithm.kl_penalty",
    "schedule": "worker.actor.optim.lr_scheduler_type",
    "optimizer": "worker.actor.optim.strategy",
    "engine": "worker.rollout.name",
    "logger": "trainer.logger",
    "dataset": "data.dataset",
    "sampler": "data.sampler",
    "family": "worker.actor.model.family",
}

GOOD = {
    "estimator": """
        @needs("group", "values")
        def good(inputs):
            advantages = (inputs.token_level_rewards - inputs.values) * inputs.response_mask
            return Advantages(advantages, advantages)
        """,
    "loss": """
        def good(inputs):
            terms = policy_terms(inputs)
            return policy_loss(terms, -terms.advantages * terms.ratio, big=terms.ratio > 2)
        """,
    "kl": """
        def good(log_ratio):
            return log_ratio.square()
        """,
    "schedule": """
        def good(position, config):
            return 1.0 - position.progress(0) / 2
        """,
    "optimizer": """
        def good(model, groups, config):
            return torch.optim.SGD(groups, momentum=0.9)
        """,
    "engine": """
        def good(config, setup):
            return None
        """,
    "logger": """
        class good(Logger):
            def log(self, metrics, step):
                raise RuntimeError("only a run calls it")
        """,
    "dataset": """
        from verl.data.rl_dataset import RLHFDataset

        class good(RLHFDataset):
            pass
        """,
    "sampler": """
        class good(RowSampler):
            next = 0

            def draw(self, count):
                self.next += 1
                return [self.next % 4]

            def state_dict(self):
                return {"next": self.next}

            def load_state_dict(self, state):
                self.next = state["next"]
        """,
    "family": """
        class MyFamily(Family):
            model_types = ("new_type",)

        good = MyFamily()
        """,
}

BAD = {
    "an estimator of the wrong shape": (
        "estimator",
        """
        def bad(inputs):
            scores = inputs.token_level_rewards.sum(-1)
            return Advantages(scores, scores)
        """,
        "must return `advantages` of shape (8, 3), got (8,)",
    ),
    "an estimator that divides by a deviation of zero": (
        "estimator",
        """
        @needs("group")
        def bad(inputs):
            mean, scores = torch.zeros(len(inputs.group_ids)), inputs.token_level_rewards.sum(-1)
            for group in inputs.group_ids.unique():
                rows = inputs.group_ids == group
                mean[rows] = (scores[rows] - scores[rows].mean()) / scores[rows].std()
            return Advantages(mean[:, None] * inputs.response_mask, mean[:, None] * inputs.response_mask)
        """,
        "must return finite numbers for `advantages`, got [[",
    ),
    "an estimator that raises": (
        "estimator",
        "def bad(inputs):\n    return inputs.values.mean()\n",
        "AttributeError: 'NoneType' object has no attribute 'mean'",
    ),
    "an estimator that returns one tensor": (
        "estimator",
        "def bad(inputs):\n    return inputs.token_level_rewards\n",
        "must return Advantages(advantages, returns), got a tensor (8, 3)",
    ),
    "a loss without gradient": (
        "loss",
        """
        def bad(inputs):
            terms = policy_terms(inputs)
            return policy_loss(terms, -terms.advantages * terms.ratio.detach())
        """,
        "must return `per_token` with a gradient, and it has none: is it detached?",
    ),
    "a selection of the wrong type": (
        "loss",
        """
        from verl.algorithms.token_selection import selects


        @selects(lambda tokens: tokens.log_probs)
        def bad(inputs):
            return PolicyLoss(inputs.log_probs, {})
        """,
        "must return `the selected tokens` of type torch.bool, got torch.float32",
    ),
    "a loss whose gradient is zero": (
        "loss",
        "def bad(inputs):\n    return PolicyLoss(inputs.log_probs * 0, {})\n",
        "must return `per_token` with a gradient, and that of the log-probs is 0",
    ),
    "a loss that is a mean": (
        "loss",
        "def bad(inputs):\n    return PolicyLoss(inputs.log_probs.mean(), {})\n",
        "must return `per_token` of shape (2, 3), got ()",
    ),
    "a loss whose statistics have a gradient": (
        "loss",
        "def bad(inputs):\n    return PolicyLoss(inputs.log_probs * 2, {'mine': inputs.log_probs})\n",
        "must detach `statistics['mine']`, which carries a gradient",
    ),
    "a KL that is not zero for equal policies": (
        "kl",
        "def bad(log_ratio):\n    return log_ratio.exp()\n",
        "must be 0 for a log-ratio of 0, as padding has, got [1.0, 1.0]",
    ),
    "a KL without gradient in the loss": (
        "kl",
        "def bad(log_ratio):\n    return log_ratio.detach().square()\n",
        "must return `the KL` with a gradient, and it has none",
    ),
    "a schedule that returns negative": (
        "schedule",
        "def bad(position, config):\n    return 1 - position.step / 10\n",
        "must return a finite factor of at least 0, got -0.1",
    ),
    "a schedule that returns nothing": (
        "schedule",
        "def bad(position, config):\n    pass\n",
        "must return a number, got None at step 2 of 20",
    ),
    "an optimizer that forgets the groups": (
        "optimizer",
        "def bad(model, groups, config):\n    return torch.optim.SGD([model[0].weight], lr=1)\n",
        "must hold every parameter of the groups, and lacks ['0.bias', '1.weight', '1.bias']",
    ),
    "an optimizer that does nothing": (
        "optimizer",
        """
        class Idle(torch.optim.SGD):
            def step(self, closure=None):
                pass


        def bad(model, groups, config):
            return Idle(groups)
        """,
        "must change every parameter, and 0.weight is the same after two steps",
    ),
    "an optimizer whose state cannot be sharded": (
        "optimizer",
        """
        class Lists(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for group in self.param_groups:
                    for param in group["params"]:
                        self.state[param]["history"] = [1, 2]


        def bad(model, groups, config):
            return Lists(groups)
        """,
        "`history` of 0.weight (4, 3) is list",
    ),
    "an engine without methods": (
        "engine",
        """
        class bad:
            def __init__(self, config, setup): ...
            def generate(self, requests, sampling): ...
        """,
        "must have the methods ['submit', 'step', 'abort', 'interrupt', 'agree', 'sync_weights'",
    ),
    "an engine that leaves out a hidden method": (
        "engine",
        """
        from verl.workers.rollout.interface import RolloutEngine


        class bad(RolloutEngine):
            def __init__(self, config, setup): ...

            sync_weights = sync_adapter = wake = sleep = rng_state = set_rng_state = close = None
            _sampling = _accept = _advance = _begun = None
        """,
        "must have the methods ['_drop']",
    ),
    "a logger that is a function": (
        "logger",
        "def bad(metrics):\n    pass\n",
        "must be a class derived from Logger, got function",
    ),
    "a logger whose method takes other arguments": (
        "logger",
        "class bad(Logger):\n    def log(self, metrics): ...\n",
        "method `log` must take ['self', 'metrics', 'step']: too many positional arguments",
    ),
    "a dataset of another base": (
        "dataset",
        "class bad(list): ...\n",
        "must be a class derived from verl.data.rl_dataset.RLHFDataset",
    ),
    "a dataset whose rendering raises": (
        "dataset",
        """
        from verl.data.rl_dataset import RLHFDataset


        class bad(RLHFDataset):
            def render(self, row):
                return row["question"]
        """,
        "KeyError: 'question' at",
    ),
    "a dataset whose items lack a tensor": (
        "dataset",
        """
        from verl.data.rl_dataset import RLHFDataset


        class bad(RLHFDataset):
            def _make_item(self, row, rendered, shape):
                return super()._make_item(row, rendered, shape) | {"prompts": row["prompt"]}
        """,
        "and lacks ['prompts']",
    ),
    "a dataset whose prompts are cut": (
        "dataset",
        """
        from verl.data.rl_dataset import RLHFDataset


        class bad(RLHFDataset):
            def collate(self, items):
                batch = super().collate(items)
                return batch | {"prompts": batch["prompts"][:, 1:]}
        """,
        "must make batches of the key table: ",
    ),
    "a sampler of another base": (
        "sampler",
        "class bad(list): ...\n",
        "must be a class derived from RowSampler",
    ),
    "a sampler without a state": (
        "sampler",
        "class bad(RowSampler):\n    def draw(self, count): return [0]\n",
        "TypeError: Can't instantiate abstract class bad with abstract methods load_state_dict, state_dict",
    ),
    "a sampler that draws rows that are not there": (
        "sampler",
        f"class bad(RowSampler):{STATELESS}    def draw(self, count): return [count]\n",
        "must draw 1 to 4 indices below 4, got [4]",
    ),
    "a sampler that draws nothing": (
        "sampler",
        f"class bad(RowSampler):{STATELESS}    def draw(self, count): ...\n",
        "must draw 1 to 4 indices below 4, got []",
    ),
    "a sampler that draws floats": (
        "sampler",
        f"class bad(RowSampler):{STATELESS}    def draw(self, count): return [0.0]\n",
        "must draw 1 to 4 indices below 4, got [0.0]; an index is an integer from 0 on",
    ),
    "a sampler that draws all rows": (
        "sampler",
        f"class bad(RowSampler):{STATELESS}    def draw(self, count): return [0, 1, 2, 3]\n",
        "must draw 1 to 2 indices below 4, got [0, 1, 2]",
    ),
    "a sampler that draws each row once": (
        "sampler",
        """
        class bad(RowSampler):
            next = 0

            def draw(self, count):
                self.next += count
                return list(range(4))[self.next - count : self.next]

            def state_dict(self):
                return {"next": self.next}

            def load_state_dict(self, state):
                self.next = state["next"]
        """,
        "must draw 1 to 2 indices below 4, got []",
    ),
    "a sampler whose resumed run draws other rows": (
        "sampler",
        f"""class bad(RowSampler):{STATELESS}
    def draw(self, count):
        self.seed += 1
        return [self.seed % 4]
""",
        "must draw the same rows after `load_state_dict`, got [3] and [2]",
    ),
    "a sampler that cannot be stored": (
        "sampler",
        f"class bad(RowSampler):{STATELESS}    def draw(self, count): return [0]\n".replace("{}", "open"),
        "It raised",
    ),
    "a family that is a name": (
        "family",
        "bad = 'qwen2_vl'\n",
        "must be a Family, got 'qwen2_vl'",
    ),
    "a family with positions of the wrong shape": (
        "family",
        """
        class Other(QwenVL):
            model_types = ("other_vl",)

            def positions(self, config, input_ids, shape):
                return torch.arange(len(input_ids))

        bad = Other()
        """,
        "must return `the position ids` of shape (4, 3), got (3,)",
    ),
}  # fmt: skip


@pytest.fixture
def checked(tmp_path):
    """Write a file and check what it names `name` as an extension of a kind."""
    saved = dict(TYPES)

    def check(kind, source, name):
        path = tmp_path / f"{kind}.py"
        path.write_text(HEAD + textwrap.dedent(source).lstrip("\n"))
        critic = "worker.critic.model.model_path=owner/model"
        value = f"[{path}:{name}]" if kind == "logger" else f"{path}:{name}"
        data = []
        if kind == "dataset":  # its first row is read
            save_tiny_model(tmp_path / "model", "qwen2")
            (tmp_path / "rows.jsonl").write_text('{"prompt": "red?", "answer": "yes"}\n')
            data = [f"data.train_files={tmp_path}/rows.jsonl"]
            data += [f"worker.actor.model.model_path={tmp_path}/model"]
        kl = ["algorithm.use_kl_loss=true"] if kind == "kl" else []
        config = load_config(
            PPOConfig,
            [*minimal_arguments(tmp_path), critic, *data, *kl, f"{OPTIONS[kind]}={value}"],
        )
        check_extensions(config)

    yield check
    TYPES.clear()
    TYPES.update(saved)


@pytest.mark.parametrize("kind", GOOD)
def test_an_extension_that_keeps_its_protocol_passes(kind, checked):
    checked(kind, GOOD[kind], "good")


@pytest.mark.parametrize("case", BAD)
def test_an_extension_that_breaks_its_protocol_is_told_with_file_function_and_rule(case, checked, tmp_path):
    kind, source, rule = BAD[case]

    with pytest.raises(ValueError) as raised:
        checked(kind, source, "bad")

    message = str(raised.value)
    assert message.startswith(f"`{OPTIONS[kind]}`: {tmp_path}/{kind}.py")
    assert "`bad`" in message and rule in message


def test_every_kind_of_extension_is_checked_and_every_check_has_an_option():
    declared = {
        entry.info.extension
        for tree in (PPOConfig, SFTConfig)
        for entry in walk_options(tree)
        if entry.info.extension
    }

    assert declared == set(KINDS)


def test_the_registry_of_a_kind_names_one_of_its_options():
    kinds = {entry.key: entry.info.extension for entry in walk_options(PPOConfig)}
    optim = {"optim.strategy": "worker.actor.optim.strategy"}
    optim["optim.lr_scheduler_type"] = "worker.actor.optim.lr_scheduler_type"

    for name, kind in KINDS.items():
        assert kinds[optim.get(kind.registry.option, kind.registry.option)] == name


def test_extensions_are_listed_with_their_options(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def one(): ...\n\n\nclass Two: ...\n")
    own = [f"algorithm.adv_estimator={path}:one", f"trainer.logger=[console,{path}:Two]"]

    found = list(extensions_in(load_config(PPOConfig, [*minimal_arguments(tmp_path), *own])))

    assert [(used.option, used.spec) for used in found] == [
        ("algorithm.adv_estimator", f"{path}:one"),
        ("trainer.logger", f"{path}:Two"),
    ]


@pytest.mark.parametrize(("base", "fits"), [("SFTDataset", True), ("RLHFDataset", False)])
def test_fine_tuning_takes_a_dataset_of_its_own_base(base, fits, tmp_path):
    (tmp_path / "images").mkdir()
    save_tiny_model(tmp_path / "model", "qwen2")
    for name in ("train", "val"):
        write_conversations(tmp_path, name, 4, seed=1)
    module = "sft_dataset" if base == "SFTDataset" else "rl_dataset"
    path = tmp_path / "own.py"
    path.write_text(f"from verl.data.{module} import {base}\n\n\nclass Own({base}): ...\n")
    config = load_config(SFTConfig, arguments_for(tmp_path, f"data.dataset={path}:Own"))

    with nullcontext() if fits else pytest.raises(ValueError, match=r"\.SFTDataset, got the class"):
        check_extensions(config)
