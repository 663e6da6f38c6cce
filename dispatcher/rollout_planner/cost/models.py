"""Cost models: how much work a sample of s tokens is, as float64 from int64 token counts.

Invariant: every model is monotone in the tokens, finite and never negative, and squares in
float64 (an int32 square overflows at 46341 tokens).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollout_planner.cost.transformer import transformer_cost
from rollout_planner.errors import ConfigError
from rollout_planner.numbers import DEAREST, LONGEST
from rollout_planner.types import CostModel, FloatArray, IntArray

_FORMS = "use `tokens`, `quadratic:a,b,d` or `hf:/path/to/config.json`"


def tokens(counts: IntArray) -> FloatArray:
    """Cost is the number of tokens: right where attention is a small part of the work."""
    return np.asarray(counts).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """Cost is a*s^2 + b*s + d for a sample of s tokens.

    The default is a dense 7B transformer up to a factor: with hidden size h a layer costs about
    4*h*s^2 for attention and 24*h^2*s for its matrices, that is 4*h*(s^2 + 6*h*s), and h is 4096.
    """

    a: float = 1.0
    b: float = 24576.0
    d: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError if a longer sample would cost less, or each sample nothing."""
        for name, value in (("a", self.a), ("b", self.b), ("d", self.d)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"cost coefficient {name} is {value}; it must be finite and not negative"
                )
        if not (self.a or self.b or self.d):
            raise ConfigError(
                "cost quadratic:0,0,0: every sample costs 0, so that no split balances better than "
                "another; give one of the coefficients a value above 0, as in quadratic:1,24576,0"
            )

    def __call__(self, counts: IntArray) -> FloatArray:
        """Cost of samples of `counts` tokens, an array, a list or a tensor, as float64[n]."""
        s = np.asarray(counts).astype(np.float64)
        cost: FloatArray = (self.a * s + self.b) * s + self.d
        return cost


def parse_cost(text: str, read: Callable[[str], str] | None = None) -> CostModel:
    """The cost model that a flag names: `tokens`, `quadratic:a,b,d` or `hf:PATH`.

    `read` returns the text of a file; this package does no IO, so `hf:` needs it from the caller.
    Raises ConfigError for any other form, and for a file that is not a usable model config.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == "tokens" and not colon:
        return tokens
    if kind == "quadratic":
        model: CostModel = _parse_quadratic(text, rest) if colon else Quadratic()
    elif kind == "hf" and rest:
        model = _parse_hf(rest, read)
    else:
        raise ConfigError(f"unknown cost model {text!r}; {_FORMS}")
    _check_range(text, model)
    return model


def _check_range(text: str, model: CostModel) -> None:
    """Raise ConfigError unless costs, their sums and their quotients are floats of full range."""
    with np.errstate(over="ignore"):
        least, most = model(np.array([1, LONGEST])).tolist()
    if not most <= DEAREST:
        raise ConfigError(
            f"cost {text}: a sample of {LONGEST} tokens costs {most:g}; it may cost at most "
            f"{DEAREST:g}, so use smaller coefficients: only their proportion counts"
        )
    if least < 1 / DEAREST:
        raise ConfigError(
            f"cost {text}: a sample of 1 token costs {least:g}; it must cost at least "
            f"{1 / DEAREST:g}, so use larger coefficients: only their proportion counts"
        )


def _parse_quadratic(text: str, rest: str) -> Quadratic:
    try:
        a, b, d = (float(part) for part in rest.split(","))
    except ValueError:
        raise ConfigError(
            f"cost model {text!r} needs three numbers, as in quadratic:1,24576,0"
        ) from None
    return Quadratic(a, b, d)


def _parse_hf(path: str, read: Callable[[str], str] | None) -> CostModel:
    if read is None:
        raise ConfigError(f"cost model hf:{path} needs a reader of files; pass parse_cost one")
    try:
        config = json.loads(read(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the model config {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"the model config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the model config {path} is not a JSON object")
    return transformer_cost(config)
