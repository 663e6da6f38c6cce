"""Forward FLOPs of a transformer on one sample, read off its Hugging Face config.json.

Invariant: only matrix products are counted, a multiply-add as two; causal attention counts the
token pairs that it visits. Backward work is twice the forward for every part alike, so the
proportion between samples, which is all that balancing needs, is the same.

Symbols: s tokens, h hidden size, H query heads, K key/value heads, d head size, w window.
A layer costs 2*s*(weights that one token meets) + (FLOPs a token pair)*(pairs), where the pairs
are s*(s+1)/2 for full attention and w*s - w*(w-1)/2 beyond a window of w < s tokens.

Example: h=4, H=K=2, d=2, two-matrix-gated MLP of 8, one layer, vocabulary 10: a token meets
4*16 (q, k, v, o) + 3*4*8 (MLP) + 40 (head) = 200 weights; a pair costs 4*H*d = 16;
s=3 costs 2*3*200 + 16*6 = 1296.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_planner.errors import ConfigError
from rollout_planner.types import FloatArray, IntArray

Config = Mapping[str, Any]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

#: Model types whose MLP has two matrices (up, down) instead of three (gate, up, down).
_UNGATED = frozenset(
    {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"}
    | {"nemotron", "opt", "persimmon", "phi", "starcoder2"}
)


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
            pairs[_window(config) if kind == SLIDING else 0] += count * per_pair
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
                "give its cost as quadratic:a,b,d instead"
            )
    return kinds


def _window(config: Config) -> int:
    return _positive(config, "sliding_window")


def _first(config: Config, *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if config.get(key)), None)


def _positive(config: Config, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"the model config needs a positive integer `{key}`, not {value!r}")
    return value
