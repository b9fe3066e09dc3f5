# SPDX-License-Identifier: Apache-2.0
"""A reward that depends on each letter of a served model's answer."""

import hashlib

REWARD_TYPE = "sequential"


async def compute_score(row, servers):
    answer = await servers["judge"].ask([{"role": "user", "content": row["response"][:40] or "?"}])
    return {"overall": hashlib.sha256(answer.encode()).digest()[0] / 255, "length": len(answer)}
