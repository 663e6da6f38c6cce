"""verl: its FSDP engine, fed with the stream's micro-batches. Checked with verl 0.9.1.

    dispatcher serve --dp-size 2 --global-batch-size 64 --micro-batch-tokens 16384
    torchrun --standalone --nproc-per-node 2 examples/verl_fsdp.py --model Qwen/Qwen3-0.6B

verl's `train_batch` cuts a rank's part of a batch into micro-batches itself, as each rank sees fit.
Here the dispatcher has done that for all ranks together, so its micro-batches go to the engine's
`forward_step` one by one, and everything round it stays verl's: loss functions (they divide by the
`batch_num_tokens` that they are told), deferred gradient synchronisation, clipping, checkpoints.
"""

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from rollout_workers import MicroBatch, MicroBatchStream, Step

# integration: begin


def train_step(engine: Any, step: Step, loss_function: Any) -> float:
    """What the engine's `train_batch` does, over the micro-batches of a step; the summed loss."""
    lost = 0.0
    engine.optimizer_zero_grad()
    for micro_batch in step:
        data = as_tensordict(engine, step, micro_batch)
        synchronised = engine._gradient_sync_context
        with synchronised(is_last_micro_batch=micro_batch.is_last):
            loss, output = engine.forward_step(data, loss_function, forward_only=False)
            loss.backward()
        lost += output["loss"]
    engine.optimizer_step()
    step.commit()
    return lost


def as_tensordict(engine: Any, step: Step, micro_batch: MicroBatch) -> TensorDict:
    """Verl's layout without padding: jagged tensors, and what its losses divide by."""
    names = [name for name in micro_batch.tensors if name not in ("cu_seqlens", "loss_weights")]
    data = TensorDict(
        {name: micro_batch[name] for name in names}, batch_size=[len(micro_batch.sample_ids)]
    )
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=engine.use_remove_padding,
        dp_size=engine.get_data_parallel_size(),
        batch_num_tokens=step.loss_tokens,
        global_batch_size=step.num_samples,
    )
    return data


# integration: end


def build_engine(args: argparse.Namespace) -> Any:
    """Verl's FSDP2 engine with a causal language model, as its workers build it."""
    packed = args.attention == "flash_attention_2"  # the others keep samples apart by padding
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=args.model,
            load_tokenizer=False,
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": args.attention},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision={"param_dtype": args.dtype, "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=args.lr, clip_grad=1.0, total_training_steps=1000, lr_warmup_steps=0
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def main() -> None:
    """Fine-tune on whatever is pushed: samples of `input_ids` and `loss_mask`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--model", required=True, help="a Hugging Face model, its name or folder")
    parser.add_argument("--attention", default="flash_attention_2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    engine = build_engine(args)
    losses = partial(sft_loss, None)
    with MicroBatchStream(args.endpoint, layout="jagged", epochs=1) as stream, engine.train_mode():
        for step in stream:
            lost = torch.tensor(train_step(engine, step, losses) / dist.get_world_size())
            dist.all_reduce(lost)
            if dist.get_rank() == 0:
                print(f"step {step.number}: loss {lost:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
