# SPDX-License-Identifier: Apache-2.0
"""Models with one number per token in place of logits: value models and reward models.

A scalar model is the causal or vision-language model with its output embedding exchanged for `score`, a
linear layer of one output. Its tensors have the names that transformers' sequence- and token-classification
models give theirs, so their checkpoints load, and what is trained here loads as one of them. Whether a model
is scalar stands in its config: `architectures` ends with `ForSequenceClassification`, or with
`ForTokenClassification` where the score has a bias.
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
    """Whether a config is one of a model that scores, rather than one that writes."""
    return any(name.endswith((WITHOUT_BIAS, WITH_BIAS)) for name in config.architectures or ())


def make_scalar(config: PreTrainedConfig, *, has_bias: bool) -> None:
    """Say in a config that its model scores with one number.

    Args:
        config: Of a causal, vision-language or scalar model; changed in place.
        has_bias: Whether the score has a bias.
    """
    mapping = (
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        if has_bias
        else modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    )
    given = (config.architectures or [config.model_type])[0]
    derived = re.sub(r"For[A-Z]\w*$", "", given) + (WITH_BIAS if has_bias else WITHOUT_BIAS)
    config.architectures = [mapping.get(config.model_type, derived)]
    config.num_labels = 1


@torch.no_grad()
def start_score(model: PreTrainedModel) -> None:
    """Give a score that no file holds its first values: weight zero, no bias."""
    drop_score_bias(model)
    model.get_parameter(SCORE_WEIGHT).zero_()


def has_score_bias(model: PreTrainedModel) -> bool:
    """Whether a scalar model's score has a bias."""
    return model.get_submodule(SCORE).bias is not None


def drop_score_bias(model: PreTrainedModel) -> None:
    """Take the bias from a scalar model's score, and say so in its config."""
    model.get_submodule(SCORE).register_parameter("bias", None)
    make_scalar(model.config, has_bias=False)


class ScalarModels:
    """Makes scalar models as transformers' auto classes make others.

    Example::

        model = ScalarModels(AutoModelForCausalLM).from_pretrained(folder, config=config)

    Args:
        auto: The auto class of the model that is given a score.
    """

    def __init__(self, auto: Any) -> None:
        self._auto = auto

    def from_config(
        self, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> PreTrainedModel:
        """A model with random weights."""
        return self._class(config, trust_remote_code)._from_config(config, **options)

    def from_pretrained(
        self, path: Any, *, config: PreTrainedConfig, trust_remote_code: bool = False, **options: Any
    ) -> Any:
        """A model with the weights of a folder; its head of another kind, if it has one, is passed over."""
        return self._class(config, trust_remote_code).from_pretrained(path, config=config, **options)

    def _class(self, config: PreTrainedConfig, trust_remote_code: bool) -> Any:
        with torch.device("meta"):
            model = self._auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        return _scalar_class(type(model))


def _scalar_class(original: Any) -> Any:
    """A subclass under the same name: transformers finds its rules for renaming tensors by it."""

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
    """Put `score` where the model looks for its output embedding, one row for each word, which goes."""
    head: Any = model.get_output_embeddings()
    [name] = [name for name, module in model.named_modules() if module is head]
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    delattr(module, leaf)
    score = nn.Linear(head.in_features, 1, bias=has_bias, dtype=head.weight.dtype, device=head.weight.device)
    setattr(model, SCORE, score)
    module.__dict__[leaf] = score  # past nn.Module: the forward finds it, its tensors keep one name
    ignored = set(model._keys_to_ignore_on_load_unexpected or ()) | {rf"^{re.escape(name)}\."}
    model._keys_to_ignore_on_load_unexpected = ignored  # the files may hold the head that is gone
