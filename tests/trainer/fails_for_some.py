# SPDX-License-Identifier: Apache-2.0
"""A reward for runs of random models whose calls fail for a quarter of the responses, each in its way."""

import os

REWARD_TYPE = "sequential"


def is_unlucky(response):
    return sum(map(ord, response)) % 4 == 0


def compute_score(entry, fails):
    letters = sum(map(ord, entry["response"]))
    if fails and is_unlucky(entry["response"]):
        if letters % 8 == 0:
            os.abort()
        raise ValueError("unlucky")
    return {"overall": letters % 7 / 7}
