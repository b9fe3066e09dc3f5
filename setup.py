# SPDX-License-Identifier: Apache-2.0
"""Only for tools that still call it; everything stands in pyproject.toml."""

from setuptools import setup

setup()
