"""Long samples over several ranks: attention in plain torch over the ranks of a block.

    dispatcher serve --dp-size 4 --global-batch-size 16 --micro-batch-tokens 256 --window 1 \
        --set max-split=4
    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py --max-split 4 --fsdp

Ranks of a block have slices of the same samples. `attend` is what a model needs for that: keys and
values of the whole samples, for the queries of this rank's rows. It is a reference, whose mask has
a place for each pair of rows; on GPUs a ring or Transformer Engine's context parallelism takes its
place, with `cp_group`, `cu_seqlens` and `cu_seqlens_unpadded`. Who pushes: any rollout worker,
whose samples have `input_ids` below 64 and a `loss_mask`.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from rollout_workers import MicroBatch, MicroBatchStream
from rollout_workers.micro_batch.blocks import gather_block, rows_in_block

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 16, 2, 2
#: Queries, keys and values of rows [rows, heads, width] to what each row attends to, likewise.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(micro_batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention inside each sample of a packed micro-batch, whichever rank has its rows."""
    keys, values = gather_block(torch.stack((key, value), dim=1), micro_batch).unbind(1)
    own, all_rows = rows_in_block(micro_batch), torch.arange(len(keys), device=keys.device)
    starts = micro_batch.cu_seqlens[1:].long()
    samples = torch.searchsorted(starts, all_rows, right=True)
    mask = (samples[own, None] == samples) & (own[:, None] >= all_rows)
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    found = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return found[0].transpose(0, 1)


class Layer(nn.Module):
    """Attention, then an MLP; [rows, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor, attention: Attend) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).view(len(hidden), 3, HEADS, -1).unbind(1)
        hidden = hidden + self.out(attention(query, key, value).flatten(1))
        found: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return found


class Transformer(nn.Module):
    """Rows of tokens at their positions to logits of each next token, [rows, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, attention: Attend) -> Tensor:
        waves = positions[:, None] / 2.0 ** torch.arange(WIDTH, device=ids.device)
        hidden = self.embedding(ids) + waves.sin().to(self.head.weight.dtype)
        for layer in self.layers:
            hidden = layer(hidden, attention)
        found: Tensor = self.head(hidden)
        return found


def make_model() -> Transformer:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Transformer().double()


def train(endpoint: str, max_split: int, slicing: str, *, fsdp: bool) -> nn.Module:
    """Until the stream ends."""
    plain = make_model()
    model: Any = plain
    if fsdp:
        for layer in plain.layers:
            fully_shard(layer)
        fully_shard(plain)
    else:
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with MicroBatchStream(
        endpoint, max_split=max_split, slicing=slicing, weights_dtype=torch.float64
    ) as stream:
        for step in stream:
            for micro_batch in step:
                with gradients_meet(model, fsdp=fsdp, here=micro_batch.is_last):
                    logits = model(
                        micro_batch.input_ids,
                        micro_batch.position_ids,
                        partial(attend, micro_batch),
                    )
                    # Each row predicts the next token of its sample, whichever rank has that.
                    losses = cross_entropy(logits, micro_batch.next_input_ids, reduction="none")
                    loss = (losses * micro_batch.next_loss_weights).sum()
                    (loss * micro_batch.loss_scale).backward()
                say(f"step {step.number}: {micro_batch.cp_size} ranks, {micro_batch.tokens} tokens")
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
    return plain


def gradients_meet(model: Any, *, fsdp: bool, here: bool) -> AbstractContextManager[None]:
    """Gradients are averaged over ranks after this backward pass, if it is the one."""
    if fsdp:
        model.set_requires_gradient_sync(here)
        return nullcontext()
    found: AbstractContextManager[None] = nullcontext() if here else model.no_sync()
    return found


def say(text: str) -> None:
    """With the rank, as ranks of other blocks train other samples."""
    print(f"rank {dist.get_rank()}: {text}", flush=True)


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--max-split", type=int, default=4, help="as the dispatcher has it")
    parser.add_argument("--slicing", default="zigzag", help="zigzag or contiguous")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--weights", type=Path, help="where rank 0 saves the weights in the end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = train(args.endpoint, args.max_split, args.slicing, fsdp=args.fsdp)
    weights = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in model.state_dict().items()
    }
    if args.weights and dist.get_rank() == 0:
        torch.save(weights, args.weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
