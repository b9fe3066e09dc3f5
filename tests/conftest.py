# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests. `verl` comes first: it makes torchvision importable beside a CPU-only torch."""

import verl  # noqa: F401
