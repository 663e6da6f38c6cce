"""prime-rl's training loop round `examples/prime_rl_loader.py`, as far as a CPU goes.

What its trainer does with a batch: count the loss tokens over all ranks, its own `compute_loss` for
each micro-batch, divided by them, and gradients summed over ranks.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.prime_rl.source import make_importable

make_importable()

from prime_rl.configs.trainer import DefaultLossConfig  # noqa: E402
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn  # noqa: E402

from examples.prime_rl_loader import StreamDataLoader  # noqa: E402


def main() -> None:
    """One step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = StreamDataLoader(Path(), 0, dist.get_world_size(), None)
    loader.wait_for_batch()
    batch: list[Any] = loader.get_batch()
    scale = torch.tensor(sum(int(each["loss_mask"].sum()) for each in batch))
    dist.all_reduce(scale)
    loss_fn = setup_rl_loss_fn(DefaultLossConfig())
    for micro_batch in batch:
        logits = model(micro_batch["input_ids"])[:, :-1].log_softmax(-1)
        found = logits.gather(-1, micro_batch["input_ids"][:, 1:, None])[..., 0]
        rows = {"trainer": nn.functional.pad(found, (1, 0))}
        rows |= {name: micro_batch[name] for name in ("inference_logprobs", "advantages")}
        rows["loss_mask"] = micro_batch["loss_mask"]
        lengths = micro_batch["sequence_lengths"]
        parts = {name: list(row[0].split(lengths)) for name, row in rows.items()}
        loss, _ = compute_loss(
            parts["trainer"], parts["inference_logprobs"], None, parts["advantages"],
            parts["loss_mask"], None, None, None, loss_fn, int(scale), 1, 1,
        )  # fmt: skip
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    loader.commit()
    loader.stream.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
