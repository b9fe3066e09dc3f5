# SPDX-License-Identifier: Apache-2.0
"""Value models and reward models, with one number per token instead of logits.

A scalar model is a causal or vision-language model whose output embedding is replaced by `score`, a linear
layer with one output. Its tensors are named as in transformers' sequence- and token-classification models, so
checkpoints are interchangeable. `architectures` in its config ends with `ForSequenceClassification`, or with
`ForTokenClassification` if the score has a bias.
"""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

SCORE, SCORE_WEIGHT, SCORE_BIAS = "score", "score.weight", "score.bias"
WITHOUT_BIAS, WITH_BIAS = "ForSequenceClassification", "ForTokenClassification"


def is_scalar(config: PreTrainedConfig) -> bool:
    return any(name.endswith((WITHOUT_BIAS, WITH_BIAS)) for name in config.architectures or ())


def make_scalar(config: PreTrainedConfig, *, has_bias: bool) -> None:
    """Turn a config into that of a scalar model, in place."""
    kind = "TOKEN" if has_bias else "SEQUENCE"
    mapping = getattr(modeling_auto, f"MODEL_FOR_{kind}_CLASSIFICATION_MAPPING_NAMES")
    given = (config.architectures or [config.model_type])[0]
    derived = re.sub(r"For[A-Z]\w*$", "", given) + (WITH_BIAS if has_bias else WITHOUT_BIAS)
    config.architectures = [mapping.get(config.model_type, derived)]
    config.num_labels = 1


@torch.no_grad()
def start_score(model: PreTrainedModel) -> None:
    """Initialize a score that is not in the model's files: weight zero, no bias."""
    drop_score_bias(model)
    model.get_parameter(SCORE_WEIGHT).zero_()


def has_score_bias(model: PreTrainedModel) -> bool:
    return model.get_submodule(SCORE).bias is not None


def drop_score_bias(model: PreTrainedModel) -> None:
    """Remove the bias of a scalar model's score, also from its config."""
    model.get_submodule(SCORE).register_parameter("bias", None)
    make_scalar(model.config, has_bias=False)


class ScalarModels:
    """Builds scalar models as transformers' auto classes build others.

    Example::

        model = ScalarModels(AutoModelForCausalLM).from_pretrained(folder, config=config)
    """

    def __init__(self, auto: Any) -> None:
        self._auto = auto

    def from_config(
        self, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> PreTrainedModel:
        return self._class(config, trust_remote_code)._from_config(config, **options)

    def from_pretrained(
        self, path: Any, *, config: PreTrainedConfig, trust_remote_code: bool = False, **options: Any
    ) -> Any:
        """Load the weights of a folder, except for a head of another kind."""
        return self._class(config, trust_remote_code).from_pretrained(path, config=config, **options)

    def _class(self, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
        with torch.device("meta"):
            model = self._auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        return _scalar_class(type(model))


def _scalar_class(original: Any) -> Any:
    # A subclass of the same name, by which transformers finds its rules for renaming tensors.
    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **options: Any) -> None:  # noqa: N807 - it is one
        original.__init__(self, config, *args, **options)
        has_bias = (config.architectures or [""])[0].endswith(WITH_BIAS)
        _exchange_head(self, has_bias)

    return type(
        original.__name__,
        (original,),
        {"__init__": __init__, "__module__": original.__module__, "_tied_weights_keys": {}},
    )


def _exchange_head(model: PreTrainedModel, has_bias: bool) -> None:
    """Replace the output embedding by `score`, where the model's forward looks for it."""
    head: Any = model.get_output_embeddings()
    [name] = [name for name, module in model.named_modules() if module is head]
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    delattr(module, leaf)
    score = nn.Linear(head.in_features, 1, bias=has_bias, dtype=head.weight.dtype, device=head.weight.device)
    setattr(model, SCORE, score)
    module.__dict__[leaf] = score  # bypasses nn.Module: the forward finds it, its tensors keep one name
    ignored = set(model._keys_to_ignore_on_load_unexpected or ()) | {rf"^{re.escape(name)}\."}
    model._keys_to_ignore_on_load_unexpected = ignored  # files may contain the replaced head
