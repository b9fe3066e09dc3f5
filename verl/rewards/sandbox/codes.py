# SPDX-License-Identifier: Apache-2.0
"""Exit codes that say how the program ended. A program that uses them only renames its own failure.

The launcher imports this module: a heavier one would slow down every run.
"""

UNCAUGHT = 121  # an uncaught exception
OUT_OF_MEMORY = 122
REJECTED = 123  # an assertion of a test did not hold
