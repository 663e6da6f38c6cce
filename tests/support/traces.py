"""The trace file of the examples in docs/operate.md: lognormal lengths, four samples a second."""

import gzip
from pathlib import Path

import numpy as np

HEADER = "arrival_s,group,run,prompt_tokens,response_tokens,truncated"


def write_example_trace(path: Path) -> None:
    """1,200 samples, always the same."""
    tokens = np.random.default_rng(0).lognormal(7, 1.2, 1200).astype(int) + 1
    rows = [f"{at / 4},{at // 4},{at % 2},10,{tokens[at]},0" for at in range(1200)]
    path.write_bytes(gzip.compress("\n".join([HEADER, *rows]).encode()))
