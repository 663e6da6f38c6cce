"""Sources of what is in no release yet.

git clone --branch dev https://github.com/NVIDIA/Megatron-LM build/frameworks/sources/Megatron-LM
git clone https://github.com/NVIDIA-NeMo/RL build/frameworks/sources/RL
git -C build/frameworks/sources/RL fetch origin pull/2133/head
git -C build/frameworks/sources/RL checkout FETCH_HEAD
"""

from typing import Any

from tests.peers.loading import load
from tests.support.source import ROOT

SOURCES = ROOT / "build" / "frameworks" / "sources"
MEGATRON, NEMO_RL = SOURCES / "Megatron-LM", SOURCES / "RL"


def has_dynamic_cp() -> bool:
    """Whether Megatron-Core's dynamic context parallelism is there."""
    path = MEGATRON / "megatron/core/datasets/data_schedule.py"
    return path.exists() and "DefaultDynamicCPScheduler" in path.read_text()


def megatron_schedule() -> Any:
    """Megatron-Core's module with `DefaultDynamicCPScheduler`, without CUDA's extensions."""
    core = "megatron.core"
    without = (
        "parallel_state", "packed_seq_params", "process_groups_config", "rerun_state_machine",
        "pipeline_parallel", "pipeline_parallel.hybrid_cp_schedule", "extensions",
        "extensions.transformer_engine", "transformer", "transformer.multi_token_prediction",
    )  # fmt: skip
    return load(MEGATRON, f"{core}.datasets.data_schedule", [f"{core}.{name}" for name in without])


def has_driver() -> bool:
    """Whether NeMo-RL's driver plans context parallelism there."""
    return (NEMO_RL / "nemo_rl/models/policy/hybrid_cp_scheduler.py").exists()


def nemo_rl_driver() -> Any:
    """NeMo-RL's module with `HeadNodeHCPScheduler`, without the Megatron-Core of its time."""
    hybrid = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    needs = ("nemo_rl.data.multimodal_utils", "nemo_rl.data.packing")
    stubs = ("megatron", "megatron.core", hybrid, *needs)
    return load(NEMO_RL, "nemo_rl.models.policy.hybrid_cp_scheduler", stubs)
