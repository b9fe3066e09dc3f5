# SPDX-License-Identifier: Apache-2.0
"""Answers of a teacher about the tokens of a text."""

from typing import NamedTuple

import numpy as np


class TokenAnswers(NamedTuple):
    """Answers about n tokens of a text."""

    log_probs: np.ndarray  # (n,) float32: of these tokens
    top_ids: np.ndarray  # (n, k) int32: the most likely tokens, by falling probability
    top_log_probs: np.ndarray  # (n, k) float32
