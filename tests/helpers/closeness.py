# SPDX-License-Identifier: Apache-2.0
"""Equality of numbers that were computed in two ways, up to float32's rounding."""

import numpy as np
import torch

TOLERANCE = 1e-5


def assert_values_close(found, expected):
    """Values agree within 1e-5 of the largest.

    A value is a sum of terms that cancel: it is rounded as they are, and processors round them differently.
    """
    found, expected = (torch.as_tensor(values).detach().numpy() for values in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=0.0))
