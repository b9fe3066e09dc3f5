# SPDX-License-Identifier: Apache-2.0
"""Peak memory and time of log-probs and entropy from hidden states, forward and backward, on CPU.

    python benchmarks/log_probs.py [--full-logits] [--dtype bfloat16] [--tokens 4096 --hidden 512
    --vocabulary 151936]

Memory is the peak resident size of this process minus its size with the inputs allocated; the last line is
JSON.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

from verl.models.fused_log_probs import linear_log_probs
from verl.models.head.logit_chunks import HeadLogits


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def full_logits(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all logits, log-softmax and entropy."""
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full-logits", action="store_true", help="compute all logits at once")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.hidden, dtype=dtype).mul_(args.hidden**-0.5).requires_grad_()
    targets = torch.randint(args.vocabulary, (args.tokens,))
    (
        hidden[:8] @ weight[:8].t()
    ).sum().backward()  # starts threads and the matmul library before the baseline
    hidden.grad = weight.grad = None

    baseline, started = resident_mib(), time.perf_counter()
    if args.full_logits:
        log_probs, entropy, *_ = full_logits(hidden, weight, targets)
    else:
        log_probs, entropy, *_ = linear_log_probs(HeadLogits(hidden, weight), targets, with_entropy=True)
    (log_probs.mean() + 0.1 * entropy.mean()).backward()
    seconds = time.perf_counter() - started
    print(
        json.dumps(
            {
                "way": "full" if args.full_logits else "fused",
                "mib": round(peak_mib() - baseline),
                "seconds": round(seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
