# SPDX-License-Identifier: Apache-2.0
"""A reward for runs of random models: every response scores something, and responses differ."""


def compute_score(reward_inputs):
    scores = []
    for entry in reward_inputs:
        letters = [ord(letter) for letter in entry["response"]]
        accuracy = float(sum(letters) % 2)
        style = (sum(letters) % 7) / 7
        scores.append({"overall": 0.7 * accuracy + 0.3 * style, "accuracy": accuracy, "style": style})
    return scores
