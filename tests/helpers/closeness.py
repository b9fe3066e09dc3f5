# SPDX-License-Identifier: Apache-2.0
"""Equality of numbers computed in two ways, up to float32 rounding."""

import numpy as np
import torch

TOLERANCE = 1e-5


def assert_values_close(found, expected):
    """Assert that values agree within 1e-5 of the largest one.

    A value is a sum of canceling terms: its rounding error is that of the terms, and differs by processor.
    """
    found, expected = (torch.as_tensor(values).detach().numpy() for values in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=0.0))
