"""Cost models: how much work a sample of s tokens is, as float64 from int64 token counts.

Invariant: every model is monotone in the tokens, finite and never negative, and squares in
float64 (an int32 square overflows at 46341 tokens).

Of a transformer it is the forward FLOPs, read off its Hugging Face config.json. Only matrix
products are counted, a multiply-add as two; causal attention counts the token pairs that it visits.
Backward work is twice the forward for every part alike, so the proportion between samples, which is
all that balancing needs, is the same.

Symbols: s tokens, h hidden size, H query heads, K key/value heads, d head size, w window.
A layer costs 2*s*(weights that one token meets) + (FLOPs a token pair)*(pairs), where the pairs
are s*(s+1)/2 for full attention and w*s - w*(w-1)/2 beyond a window of w < s tokens.

Example: h=4, H=K=2, d=2, two-matrix-gated MLP of 8, one layer, vocabulary 10: a token meets
4*16 (q, k, v, o) + 3*4*8 (MLP) + 40 (head) = 200 weights; a pair costs 4*H*d = 16;
s=3 costs 2*3*200 + 16*6 = 1296.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from rollout_planner.errors import ConfigError
from rollout_planner.types import CostModel, FloatArray, IntArray

#: Lengths are summed as int64, so that a million of them may be as long as this.
LONGEST = 2**43
#: Sums of costs stay finite, also of as many as the largest budget has room for.
DEAREST = 1e280

Config = Mapping[str, Any]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

#: Model types whose MLP has two matrices (up, down) instead of three (gate, up, down).
_UNGATED = frozenset(
    {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"}
    | {"nemotron", "opt", "persimmon", "phi", "starcoder2"}
)


#: Before another form, or alone: the cost is that one, until something better is known.
AUTO = "auto"
_FORMS = "use `auto`, `tokens`, `quadratic:a,b,c,d` or `hf:/path/to/config.json`"


def tokens(counts: IntArray) -> FloatArray:
    """Cost is the number of tokens: right where attention is a small part of the work."""
    return np.asarray(counts).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Quadratic:
    """Cost is a*s^2 + b*s + c for a sample of s tokens, and d to begin a micro-batch.

    d says what another micro-batch has to save, and is part of no sample's cost.

    The default is what verl has for a dense 7B transformer, up to a factor: with hidden size h a
    layer costs 4*h*s^2 for attention and 24*h^2*s for its matrices, that is 4*h*(s^2 + 6*h*s), and
    h is 4096. Causal attention that skips what it masks costs half of that, and vocabulary and
    gated MLPs are left out: by `transformer_cost` b / a of Qwen2.5-7B is 70456.
    """

    a: float = 1.0
    b: float = 24576.0
    c: float = 0.0
    d: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError if a longer sample would cost less, or each sample nothing."""
        for name, value in zip("abcd", astuple(self), strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"cost coefficient {name} is {value}; it must be finite and not negative"
                )
        if not (self.a or self.b or self.c):
            raise ConfigError(
                "cost quadratic:0,0,0: every sample costs 0, so that no split balances better than "
                "another; give one of the coefficients a value above 0, as in quadratic:1,24576,0"
            )

    def __call__(self, counts: IntArray) -> FloatArray:
        """Cost of samples of `counts` tokens, an array, a list or a tensor, as float64[n]."""
        s = np.asarray(counts).astype(np.float64)
        cost: FloatArray = (self.a * s + self.b) * s + self.c
        return cost

    def __str__(self) -> str:
        """As `parse_cost` reads it."""
        found = ",".join(f"{value:.6g}" for value in astuple(self))
        return f"quadratic:{found}"


def parse_cost(text: str, read: Callable[[str], str] | None = None) -> CostModel:
    """The cost model that a flag names: `tokens`, `quadratic:a,b,c,d` or `hf:PATH`;
    or `auto` for a default, `auto:` and one of these for that.

    `read` returns the text of a file; this package does no IO, so `hf:` needs it from the caller.
    Raises ConfigError for any other form, and for a file that is not a usable model config.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind == AUTO:
        return parse_cost(rest, read) if colon else Quadratic()
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
        numbers = [float(part) for part in rest.split(",")]
        if not 2 < len(numbers) <= len(fields(Quadratic)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"cost model {text!r} needs three or four numbers, as in quadratic:1,24576,0"
        ) from None
    return Quadratic(*numbers)


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


@dataclass(frozen=True, slots=True)
class TransformerCost:
    """Cost is per_token*s plus, for each (window, per_pair), per_pair times the pairs visited.

    A window of 0 means full causal attention.
    """

    per_token: float
    attention: tuple[tuple[int, float], ...]

    def __call__(self, counts: IntArray) -> FloatArray:
        """Forward FLOPs of samples of `counts` tokens, an array, list or tensor, as float64[n]."""
        s = np.asarray(counts).astype(np.float64)
        cost: FloatArray = self.per_token * s
        for window, per_pair in self.attention:
            seen = np.minimum(s, window) if window else s
            cost += per_pair * (seen * s - seen * (seen - 1) / 2)
        return cost


def transformer_cost(config: Config) -> TransformerCost:
    """The cost model of the language model that `config` (a parsed config.json) describes.

    Understands dense and grouped-query attention, MLA, mixtures of experts (active and shared
    experts), sliding-window layers and linear-attention layers. Raises ConfigError naming the
    key that is missing or the layer kind that it does not know.
    """
    config = config.get("text_config") or config
    kinds = _layer_kinds(config)
    weights = float(_positive(config, "hidden_size") * _positive(config, "vocab_size"))
    weights += sum(_mlp_weights(config, layer) for layer in range(len(kinds)))
    pairs: Counter[int] = Counter()
    per_token = 0.0
    for kind, count in Counter(kinds).items():
        if kind == LINEAR:
            projections, state = _linear_attention(config)
            per_token += count * state
        else:
            projections, per_pair = _attention(config)
            pairs[_positive(config, "sliding_window") if kind == SLIDING else 0] += count * per_pair
        weights += count * projections
    per_token += 2.0 * weights
    return TransformerCost(per_token, tuple((w, float(p)) for w, p in sorted(pairs.items())))


def _attention(config: Config) -> tuple[int, int]:
    """Weights that a token meets in one attention layer, and FLOPs a token pair."""
    h, H = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        return _latent_attention(config, h, H)
    K = config.get("num_key_value_heads") or (1 if config.get("multi_query") else H)
    d = config.get("head_dim") or h // H
    return 2 * h * d * (H + K), 4 * H * d


def _latent_attention(config: Config, h: int, H: int) -> tuple[int, int]:
    """MLA: queries and key/values go through low-rank latents; only the head sizes meet pairs."""
    nope, rope = _positive(config, "qk_nope_head_dim"), _positive(config, "qk_rope_head_dim")
    v, kv_rank = _positive(config, "v_head_dim"), _positive(config, "kv_lora_rank")
    q_rank = config.get("q_lora_rank")
    query = h * q_rank + q_rank * H * (nope + rope) if q_rank else h * H * (nope + rope)
    latent = h * (kv_rank + rope) + kv_rank * H * (nope + v)
    return query + latent + H * v * h, 2 * H * (nope + rope + v)


def _linear_attention(config: Config) -> tuple[int, int]:
    """Weights that a token meets in one linear-attention layer, and FLOPs of its state update.

    Gated delta rule where the config has its keys: read the state (2*k*v), write it (2*k*v),
    read the answer (2*k*v) per head. Otherwise plain linear attention, which does not read first.
    """
    h = _positive(config, "hidden_size")
    if "linear_num_value_heads" not in config:
        H = _positive(config, "num_attention_heads")
        d = config.get("head_dim") or h // H
        return 4 * h * H * d, 4 * H * d * d
    heads_k = _positive(config, "linear_num_key_heads")
    heads_v = _positive(config, "linear_num_value_heads")
    dim_k, dim_v = (
        _positive(config, "linear_key_head_dim"),
        _positive(config, "linear_value_head_dim"),
    )
    keys, values = heads_k * dim_k, heads_v * dim_v
    convolution = (2 * keys + values) * config.get("linear_conv_kernel_dim", 0)
    projections = h * (2 * keys + 2 * values + 2 * heads_v) + values * h
    return projections + convolution, 6 * heads_v * dim_k * dim_v


def _mlp_weights(config: Config, layer: int) -> int:
    """Weights that one token meets in the MLP of `layer`: active experts only."""
    h = _positive(config, "hidden_size")
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    experts = _first(config, "n_routed_experts", "num_experts", "num_local_experts")
    if not experts or not _is_sparse(config, layer):
        return matrices * h * (config.get("intermediate_size") or 4 * h)
    active = _first(config, "num_experts_per_tok", "experts_per_token")
    if not active:
        raise ConfigError("the model config has experts but no `num_experts_per_tok`")
    width = config.get("moe_intermediate_size") or _positive(config, "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or (
        (config.get("n_shared_experts") or 0) * width
    )
    return matrices * h * (active * width + shared) + h * experts


def _is_sparse(config: Config, layer: int) -> bool:
    """Whether `layer` has experts: some models keep their first or every other layer dense."""
    if layer < (config.get("first_k_dense_replace") or 0):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    if "decoder_sparse_step" in config:
        return (layer + 1) % int(config["decoder_sparse_step"]) == 0
    return layer % int(config.get("moe_layer_freq") or 1) == 0


def _layer_kinds(config: Config) -> list[str]:
    """The attention kind of every layer, from `layer_types` or from the older keys."""
    layers = _positive(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None:
        return _checked_kinds(list(kinds), layers)
    if config.get("full_attention_interval"):
        interval = int(config["full_attention_interval"])
        return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * layers
    if config.get("use_sliding_window"):
        start = int(config.get("max_window_layers") or 0)
        return [SLIDING if i >= start else FULL for i in range(layers)]
    pattern = config.get("sliding_window_pattern") or (
        2 if config.get("model_type") == "gemma2" else 0
    )
    return [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(layers)]


def _checked_kinds(kinds: list[str], layers: int) -> list[str]:
    if len(kinds) != layers:
        raise ConfigError(f"the model config lists {len(kinds)} `layer_types` for {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING, LINEAR):
            raise ConfigError(
                f"the model config has a layer of unknown kind {kind!r}; "
                "give its cost as quadratic:a,b,c instead"
            )
    return kinds


def _first(config: Config, *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if config.get(key)), None)


def _positive(config: Config, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"the model config needs a positive integer `{key}`, not {value!r}")
    return value
