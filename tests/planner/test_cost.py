"""Claims about cost models: the FLOPs that one derives by hand, and clear refusals."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_dispatcher.errors import ConfigError
from rollout_planner import Quadratic, parse_cost, tokens, transformer_cost
from rollout_planner.cost import Config
from rollout_planner.types import CostModel

DENSE: dict[str, object] = {
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 10,
}
HEAD = 4 * 10
MLP = 3 * 4 * 8


def flops(config: Config, s: int) -> float:
    return float(transformer_cost(config)(np.array([s]))[0])


def full_pairs(s: int) -> int:
    return sum(range(1, s + 1))


def window_pairs(s: int, w: int) -> int:
    return sum(min(i, w) for i in range(1, s + 1))


def test_dense_attention_counts_four_square_matrices_and_two_products_a_pair() -> None:
    weights = 2 * (4 * 4 * 4 + MLP) + HEAD
    assert flops(DENSE, 7) == 2 * 7 * weights + 2 * (4 * 4) * full_pairs(7)


def test_two_matrix_mlp_where_the_model_type_has_no_gate() -> None:
    weights = 2 * (4 * 4 * 4 + 2 * 4 * 8) + HEAD
    config = {**DENSE, "model_type": "gpt_neox"}
    assert flops(config, 3) == 2 * 3 * weights + 2 * 16 * full_pairs(3)


def test_grouped_queries_shrink_keys_and_values_but_not_the_pairs() -> None:
    config = {**DENSE, "num_key_value_heads": 1, "head_dim": 6}
    attention = 4 * 12 + 2 * (4 * 6) + 12 * 4  # q; k and v; o
    assert flops(config, 5) == 2 * 5 * (2 * (attention + MLP) + HEAD) + 2 * 4 * 12 * full_pairs(5)


def test_latent_attention_pays_for_its_low_ranks() -> None:
    config = {
        **DENSE,
        "q_lora_rank": 3,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 1,
        "v_head_dim": 4,
    }
    query = 4 * 3 + 3 * 2 * (2 + 1)
    latent = 4 * (5 + 1) + 5 * 2 * (2 + 4)
    output = 2 * 4 * 4
    weights = 2 * (query + latent + output + MLP) + HEAD
    pair = 2 * 2 * (2 + 1) + 2 * 2 * 4  # scores, then values
    assert flops(config, 6) == 2 * 6 * weights + 2 * pair * full_pairs(6)


def test_latent_attention_without_query_rank_projects_queries_directly() -> None:
    config = {**DENSE, "kv_lora_rank": 5, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1}
    config |= {"v_head_dim": 4, "q_lora_rank": None}
    attention = 4 * 2 * 3 + (4 * 6 + 5 * 2 * 6) + 2 * 4 * 4
    expected = 2 * (2 * (attention + MLP) + HEAD) + 2 * (2 * 2 * 3 + 2 * 2 * 4)
    assert flops(config, 1) == expected


def test_experts_count_only_while_active() -> None:
    config = {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2}
    sparse = 3 * 4 * (2 * 8) + 4 * 8  # two experts, and the router
    assert flops(config, 4) == 2 * 4 * (2 * (64 + sparse) + HEAD) + 2 * 16 * full_pairs(4)


def test_shared_experts_and_dense_first_layers() -> None:
    config = {
        **DENSE,
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 5,
        "first_k_dense_replace": 1,
    }
    sparse = 3 * 4 * (2 * 5 + 5) + 4 * 6
    weights = (64 + MLP) + 2 * (64 + sparse) + HEAD
    assert flops(config, 2) == 2 * 2 * weights + 3 * 16 * full_pairs(2)


def test_every_other_layer_sparse_with_a_shared_expert_of_its_own_size() -> None:
    config = {
        **DENSE,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
        "decoder_sparse_step": 2,
    }
    sparse = 3 * 4 * (2 * 5 + 7) + 4 * 6
    assert flops(config, 2) == 2 * 2 * (128 + MLP + sparse + HEAD) + 2 * 16 * full_pairs(2)


@pytest.mark.parametrize(
    ("keys", "sliding"),
    [
        ({"sliding_window": 3}, 2),
        ({"sliding_window": 3, "use_sliding_window": False}, 0),
        ({"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}, 1),
        ({"sliding_window": 3, "model_type": "gemma2"}, 1),
        ({"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}, 1),
        ({"sliding_window": None}, 0),
    ],
)
def test_sliding_layers_see_no_further_than_their_window(
    keys: dict[str, object], sliding: int
) -> None:
    weights = 2 * (64 + MLP) + HEAD
    for s in (2, 3, 9):
        pairs = sliding * window_pairs(s, 3) + (2 - sliding) * full_pairs(s)
        assert flops({**DENSE, **keys}, s) == 2 * s * weights + 16 * pairs


def test_linear_attention_layers_cost_the_same_for_every_token() -> None:
    config = {
        **DENSE,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 2,
        "linear_conv_kernel_dim": 4,
    }
    projections = 4 * (2 * 6 + 2 * 8 + 2 * 4) + 8 * 4  # q, k, v, gate, two scalars a head; out
    convolution = (2 * 6 + 8) * 4
    state = 3 * 2 * (4 * 3 * 2)  # read, write, read again
    weights = (projections + convolution + MLP) + (64 + MLP) + HEAD
    assert flops(config, 5) == 5 * (2 * weights + state) + 16 * full_pairs(5)


def test_plain_linear_attention_uses_the_heads_that_the_config_has() -> None:
    config = {**DENSE, "layer_types": ["linear_attention", "full_attention"]}
    assert flops(config, 3) == 3 * (2 * (128 + 2 * MLP + HEAD) + 4 * 2 * 2 * 2) + 16 * 6


def test_the_language_model_of_a_multimodal_config_is_found() -> None:
    assert flops({"text_config": DENSE, "vision_config": {}}, 4) == flops(DENSE, 4)


def test_the_default_is_the_dense_7b_formula_up_to_a_factor() -> None:
    """The quadratic default counts the whole square, 4*h*s^2; causal layers visit half of it."""
    config = {**DENSE, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 1}
    config |= {"num_hidden_layers": 1, "intermediate_size": 4096 * 8 // 3}
    s = 8192
    linear = 24 * 4096**2 * s
    assert flops(config, s) == pytest.approx(linear + 2 * 4096 * s * s, rel=1e-3)
    assert 4 * 4096 * Quadratic()(np.array([s]))[0] == linear + 4 * 4096 * s * s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "1 `layer_types` for 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "unknown kind 'mamba'"),
        ({"num_experts": 4}, "num_experts_per_tok"),
    ],
)
def test_a_config_that_cannot_be_costed_names_the_key(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_cost({**DENSE, **change})


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2), st.sampled_from([2, 3, 2**20]))
def test_every_model_is_finite_and_monotone(counts: list[int], window: int) -> None:
    s = np.sort(np.array(counts))
    models = (tokens, Quadratic(), transformer_cost({**DENSE, "sliding_window": window}))
    for model in models:
        cost = model(s)
        assert cost.dtype == np.float64
        assert np.isfinite(cost).all()
        assert (np.diff(cost) >= 0).all()
        assert (cost >= 0).all()


def test_squares_of_int32_lengths_do_not_overflow() -> None:
    assert Quadratic(1, 0, 0)(np.array([46341, 2**31 - 1], dtype=np.int32)).tolist() == [
        46341.0**2,
        (2.0**31 - 1) ** 2,
    ]


def test_flag_forms_are_parsed() -> None:
    assert parse_cost("tokens") is tokens
    assert parse_cost("quadratic:1,24576,0") == Quadratic()
    assert parse_cost("quadratic:2,3,4")(np.array([10])).tolist() == [234.0]
    model = parse_cost(
        "hf:/models/config.json", {"/models/config.json": json.dumps(DENSE)}.__getitem__
    )
    assert model == transformer_cost(DENSE)


def refuse(path: str) -> str:
    raise FileNotFoundError(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops", "unknown cost model 'flops'; use `auto`"),
        ("hf:", "unknown cost model"),
        ("quadratic:1,2", "three or four numbers"),
        ("quadratic:1,x,0", "three or four numbers"),
        ("quadratic:-1,0,0", "coefficient a is -1.0"),
        ("quadratic:nan,0,0", "coefficient a is nan"),
        ("quadratic:0,inf,0", "coefficient b is inf"),
        ("quadratic:0,0,0", "every sample costs 0.*give one of the coefficients a value above 0"),
        ("quadratic:1e300,0,0", "a sample of 8796093022208 tokens costs inf.*at most 1e.280"),
        ("quadratic:0,1e-300,0", "a sample of 1 token costs 1e-300.*at least 1e-280"),
        ("hf:/no/such.json", "cannot read the model config /no/such.json"),
    ],
)
def test_a_bad_flag_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cost(text, refuse)


def test_coefficients_that_make_every_sample_free_are_refused() -> None:
    with pytest.raises(ConfigError, match="every sample costs 0"):
        Quadratic(0.0, 0.0, 0.0)
    assert Quadratic(0.0, 0.0, 5.0)(np.array([1, 9])).tolist() == [5.0, 5.0]


def test_a_model_config_that_is_no_json_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        parse_cost("hf:x", lambda _: "{")
    with pytest.raises(ConfigError, match="not a JSON object"):
        parse_cost("hf:x", lambda _: "[]")
    with pytest.raises(ConfigError, match="needs a reader"):
        parse_cost("hf:x")


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize("cost", [tokens, Quadratic(), transformer_cost(DENSE)])
def test_lists_arrays_and_tensors_of_lengths_have_a_cost(make: Any, cost: CostModel) -> None:
    lengths = [9000, 120, 300]
    assert cost(make(lengths)).tolist() == cost(np.array(lengths)).tolist()
