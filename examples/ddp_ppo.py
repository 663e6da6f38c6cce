"""PPO with DDP: mini-batches of one policy version, and a critic that is trained in the same loop.

Three commands, each in a terminal of its own:

    dispatcher serve --dp-size 2 --global-batch-size 32 --micro-batch-tokens 512 \
        --sync step --steps-per-version 4 --max-staleness 4
    torchrun --standalone --nproc-per-node 2 examples/ddp_ppo.py train
    python examples/ddp_ppo.py rollout

A mini-batch is a step of the dispatcher, so that each has its own plan and its own normalisation:
four of 32 samples are one policy version. Epochs go over one mini-batch before the next one begins.
Actor and critic train on the same micro-batches, each with an optimizer; with FSDP2 both wait for
their last micro-batch in the same way. The task is that of ddp_grpo.py: say the digit again.
"""

import argparse
import random
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rollout_dispatcher.errors import RunFinished
from rollout_workers import MicroBatch, MicroBatchStream, RolloutProducer, RolloutSample

DIGITS, END = 4, 4  # tokens 0 to 3 are digits, 4 ends an answer
ANSWERS, MAX_TOKENS = 16, 16
MINI_BATCHES, EPOCHS, CLIP, LEARNING_RATE = 4, 2, 0.2, 2e-2


class Recurrent(nn.Module):
    """ids [n, tokens] -> `outputs` numbers for each token [n, tokens, outputs]."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.recurrent(self.embedding(ids))[0])
        return found


# -- the trainers -----------------------------------------------------------------------------


def train(endpoint: str, weights: Path, steps: int | None) -> None:
    """A DP rank: each dispatched step is a mini-batch, `EPOCHS` optimizer steps of both models."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    models = [DistributedDataParallel(Recurrent(DIGITS + 1)), DistributedDataParallel(Recurrent(1))]
    actor, critic = models
    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in models]
    # integration: begin
    with MicroBatchStream(endpoint, layout="padded", epochs=1 + EPOCHS) as stream:
        for step in islice(stream, steps):
            gained, missed, before = torch.zeros(()), torch.zeros(()), []
            with torch.no_grad(), step.timer("values"):  # as they are before the step
                for micro_batch in step:
                    before.append(values(critic.module, micro_batch))
                    missed += mean_of(squared_error(before[-1], micro_batch), micro_batch)
                    gained += 0 if micro_batch.is_filler else micro_batch.reward.sum()
            for _ in range(EPOCHS):
                for micro_batch, baseline in zip(step, before, strict=True):
                    with ExitStack() as syncs:
                        if not micro_batch.is_last:
                            for model in models:
                                syncs.enter_context(model.no_sync())
                        losses = clipped(actor, micro_batch, baseline)
                        losses += squared_error(values(critic, micro_batch), micro_batch)
                        mean_of(losses, micro_batch).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            version, mini_batch = divmod(step.number + 1, MINI_BATCHES)
            if mini_batch == 0:  # the last one of this version: rollouts get new weights
                publish(actor, weights, version)
                stream.set_policy_version(version)
            step.commit()
            # integration: end
            dist.all_reduce(sums := torch.stack([gained, missed]))
            reward, error = sums[0] / step.num_samples, sums[1] / dist.get_world_size()
            say(f"step {step.number}: mean reward {reward:.3f}, the critic's error {error:.4f}")
        stream.finish()
    dist.destroy_process_group()


def values(critic: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """The reward that is expected at each token, from what comes before it, [n, tokens]."""
    found: Tensor = critic(micro_batch.input_ids)[:, :-1, 0]
    return nn.functional.pad(found, (1, 0))


def squared_error(found: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The critic's loss of each token, [n, tokens]."""
    return (found - micro_batch.reward[:, None]) ** 2


def clipped(actor: nn.Module, micro_batch: MicroBatch, baseline: Tensor) -> Tensor:
    """PPO's clipped objective as a loss of each token, [n, tokens]."""
    new = log_probs(actor(micro_batch.input_ids), micro_batch.input_ids)
    ratio = (new - micro_batch.logprobs).exp()
    advantage = micro_batch.reward[:, None] - baseline
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def mean_of(losses: Tensor, micro_batch: MicroBatch) -> Tensor:
    """This micro-batch's part of the mean over all tokens of the step, on all ranks."""
    return (losses * micro_batch.loss_weights).sum() * micro_batch.loss_scale


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each token given those before it, [n, tokens]; the first of a sample has none: 0."""
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(found, (1, 0))


def publish(model: DistributedDataParallel, path: Path, version: int) -> None:
    """Hand the weights to rollout workers: written beside and renamed, so nobody reads half."""
    if dist.get_rank() == 0:
        beside = path.with_suffix(".part")
        torch.save({"version": version, "model": model.module.state_dict()}, beside)
        beside.replace(path)


def say(text: str) -> None:
    """Print once, not once a rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# -- a rollout worker -------------------------------------------------------------------------


def rollout(endpoint: str, weights: Path, prompts: int) -> None:
    """Generate with the newest weights and push; `push_many` waits for room."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    actor, version, chance = Recurrent(DIGITS + 1), 0, random.Random(0)
    with RolloutProducer(endpoint) as producer, suppress(RunFinished):  # trainers have had enough
        for _ in range(prompts):
            version = refresh(actor, version, weights)
            samples = generate(actor, chance.randrange(DIGITS))
            producer.push_many([RolloutSample(each, policy_version=version) for each in samples])
        producer.end_stream()


def refresh(actor: nn.Module, version: int, path: Path) -> int:
    """Load the weights if there are newer ones; returns the version that the model has now."""
    if not path.exists():
        return version
    found = torch.load(path, weights_only=True)
    if found["version"] > version:
        actor.load_state_dict(found["model"])
    return max(version, int(found["version"]))


@torch.no_grad()
def generate(actor: nn.Module, digit: int) -> list[dict[str, Any]]:
    """Answers to one prompt, each to its end token or to `MAX_TOKENS`, with their log-probs."""
    ids = torch.full((ANSWERS, 1), digit)
    for _ in range(MAX_TOKENS):
        ids = torch.cat([ids, actor(ids)[:, -1].softmax(-1).multinomial(1)], dim=1)
    sampled = log_probs(actor(ids), ids)
    samples = []
    for row, logprobs in zip(ids.tolist(), sampled, strict=True):
        size = row.index(END, 1) + 1 if END in row[1:] else len(row)
        samples.append(
            {
                "input_ids": row[:size],
                "loss_mask": [False] + [True] * (size - 1),  # the prompt is no target
                "logprobs": logprobs[:size],
                "reward": row[1:size].count(digit) / (size - 1),
            }
        )
    return samples


def main() -> None:
    """One of the two roles."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=["train", "rollout"])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--weights", type=Path, default=Path("ppo-weights.pt"))
    parser.add_argument("--steps", type=int, help="that are trained; default: all that come")
    parser.add_argument("--prompts", type=int, default=240, help="that rollouts answer")
    args = parser.parse_args()
    if args.role == "train":
        train(args.endpoint, args.weights, args.steps)
    else:
        rollout(args.endpoint, args.weights, args.prompts)


if __name__ == "__main__":
    main()
