"""The environment that these tests run in is the one that was asked for."""

import sys
from pathlib import Path

import torch


def test_there_is_one_torch_for_all_environments() -> None:
    assert not Path(torch.__file__).is_relative_to(sys.prefix)
