"""Synthetic rollouts that a small model can learn: a noisy walk along one fixed permutation.

The token after t is PERMUTATION[t], except that one in `NOISE` is drawn at random. A model that
has learnt the permutation is left with the loss of the noise. Sample `index` is the same tokens
wherever and whenever it is made.

A process of the demo ends when the process that started it is gone. The starter holds the other end
of standard input, which children inherit through any launcher in between: when that closes, by
intent or because the starter was killed, every child leaves.
"""

import os
import sys
import threading

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 64
#: One token in ten is noise.
NOISE = 10
#: A quarter of a sample is its prompt, which the loss does not count.
PROMPT_SHARE = 4
PERMUTATION = np.random.default_rng(20).permutation(VOCABULARY)


def rollout(index: int, tokens: int, seed: int) -> dict[str, NDArray[np.generic]]:
    """`input_ids` int64[tokens] and `loss_mask` bool[tokens] of one sample."""
    rng = np.random.default_rng((seed, index))
    ids = rng.integers(VOCABULARY, size=tokens)
    follows = rng.integers(NOISE, size=tokens) > 0
    for at in range(1, tokens):
        if follows[at]:
            ids[at] = PERMUTATION[ids[at - 1]]
    mask = np.ones(tokens, dtype=np.bool_)
    mask[: max(1, tokens // PROMPT_SHARE)] = False
    return {"input_ids": ids, "loss_mask": mask}


def leave_with_starter() -> None:
    """Watch standard input from a daemon thread, and leave at once when it ends."""
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)
