"""FSDP2: gradients meet at a step's last micro-batch, and a checkpoint holds the stream too.

    dispatcher serve --dp-size 2 --global-batch-size 16 --micro-batch-tokens 256 \
        --journal-dir journal
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --folder checkpoints

End it in mid-run and start it again: it loads its newest checkpoint, and the dispatcher goes back
to where that was taken; the steps since come again with the same samples in the same micro-batches,
so the weights at the end are those of a run that was never ended. Who pushes: any rollout worker,
whose samples have `input_ids` below 64 and a `loss_mask`.
"""

import argparse
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from rollout_workers import MicroBatch, MicroBatchStream

VOCABULARY, WIDTH, BLOCKS, HEADS = 64, 32, 2, 2


class Block(nn.Module):
    """Causal attention inside each sample of a packed micro-batch, then an MLP; [tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor, bounds: list[int]) -> Tensor:
        qkv = self.qkv(self.norm(hidden)).view(len(hidden), 3, HEADS, -1)
        query, key, value = qkv.permute(1, 2, 0, 3).unbind()
        # On a GPU this is one call of a varlen kernel, which takes cu_seqlens and max_seqlen.
        attended = [
            scaled_dot_product_attention(
                query[None, :, start:stop], key[None, :, start:stop], value[None, :, start:stop],
                is_causal=True,
            )[0]
            for start, stop in pairwise(bounds)
        ]  # fmt: skip
        hidden = hidden + self.out(torch.cat(attended, dim=1).transpose(0, 1).flatten(1))
        mixed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return mixed


class Transformer(nn.Module):
    """A packed micro-batch -> logits of each next token, [tokens, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        hidden = self.embedding(micro_batch.input_ids) + self.places(micro_batch.position_ids)
        bounds = micro_batch.cu_seqlens.tolist()
        for block in self.blocks:
            hidden = block(hidden, bounds)
        logits: Tensor = self.head(hidden)
        return logits


def token_losses(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Loss of each token given those before it, [tokens]."""
    logits = model(micro_batch)
    return pad(cross_entropy(logits[:-1], micro_batch.input_ids[1:], reduction="none"), (1, 0))


def train(endpoint: str, folder: Path, every: int, last_step: int | None) -> None:
    """One FSDP rank, from the newest checkpoint to the end of the stream (or `last_step`)."""
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model: Any = Transformer().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # integration: begin
    with MicroBatchStream(endpoint, epochs=1, device=device) as stream:
        resume(folder, model, optimizer, stream)
        for step in stream:
            lost = torch.zeros((), device=device)
            for micro_batch in step:
                # Reduce-scatter once a step, not once a micro-batch.
                model.set_requires_gradient_sync(micro_batch.is_last)
                losses = token_losses(model, micro_batch) * micro_batch.loss_weights
                (losses.sum() * micro_batch.loss_scale).backward()
                lost += losses.detach().sum()
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            # integration: end
            dist.all_reduce(lost)
            say(f"step {step.number}: loss {lost / step.loss_tokens:.6f}")
            if (step.number + 1) % every == 0:
                save(folder, step.number, model, optimizer, stream)
            if step.number == last_step:
                break
    dist.destroy_process_group()


def own_device() -> torch.device:
    """A GPU of this rank's own, where the machine has one for each of its ranks; else the CPU."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer,
    stream: MicroBatchStream,
) -> None:  # fmt: skip
    """Save everything with the stream among it; then tell the dispatcher that this is durable."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "stream": stream}
    dcp.save(state, checkpoint_id=folder / f"step-{step:06d}")  # type: ignore[attr-defined]
    stream.checkpoint_saved(stream.state_dict())  # it frees the samples up to here


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stream: MicroBatchStream
) -> None:
    """Load the newest checkpoint, if there is one, on every rank and before its first step."""
    newest = max(folder.glob("step-*/.metadata"), default=None)
    if newest is None:
        return
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "stream": stream}
    dcp.load(state, checkpoint_id=newest.parent)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    say(f"resumed from {newest.parent.name}")


def say(text: str) -> None:
    """Print once, not once a rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--every", type=int, default=2, help="steps from checkpoint to checkpoint")
    parser.add_argument("--last-step", type=int, help="stop after it, checkpoint or not")
    args = parser.parse_args()
    train(args.endpoint, args.folder, args.every, args.last_step)


if __name__ == "__main__":
    main()
