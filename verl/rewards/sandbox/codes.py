# SPDX-License-Identifier: Apache-2.0
"""Exit codes by which the child says how the program ended.

A program that uses them itself only changes the name of its own failure.
"""

UNCAUGHT = 121  # an exception that nobody caught
OUT_OF_MEMORY = 122
REJECTED = 123  # an assertion of a test did not hold
