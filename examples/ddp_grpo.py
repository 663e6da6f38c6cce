"""GRPO with DDP: old log-probs, several epochs over a step, whole groups, weights for the rollouts.

Three commands, each in a terminal of its own:

    dispatcher serve --dp-size 2 --global-batch-groups 8 --group-size 8 \
        --micro-batch-tokens 512 --sync step --max-staleness 8
    torchrun --standalone --nproc-per-node 2 examples/ddp_grpo.py train
    python examples/ddp_grpo.py rollout

The task is small enough for a CPU: after a digit, say that digit again and again. The rollout
worker generates with the newest weights it finds, eight answers a prompt; the trainers make an
optimizer step for each epoch over a step's micro-batches. The reward goes from a fifth to nearly
one.
"""

import argparse
import random
from contextlib import nullcontext, suppress
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
GROUP_SIZE, MAX_TOKENS = 8, 16
EPOCHS, CLIP, LEARNING_RATE = 2, 0.2, 2e-2


class Policy(nn.Module):
    """A causal language model: ids [n, tokens] -> logits of each next token [n, tokens, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, DIGITS + 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.embedding(ids))[0])
        return logits


# -- the trainers -----------------------------------------------------------------------------


def train(endpoint: str, weights: Path, steps: int | None) -> None:
    """A DP rank: one dispatched step, whole groups of it, is `EPOCHS` optimizer steps here."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    trained = 0
    # integration: begin
    # Each step is iterated once for the old log-probs and once an epoch; who says so saves a copy.
    with MicroBatchStream(endpoint, layout="padded", epochs=1 + EPOCHS) as stream:
        for step in islice(stream, steps):
            gained, old = torch.zeros(()), []
            with torch.no_grad():  # the policy as it is before the step: the ratio's denominator
                for micro_batch in step:
                    old.append(log_probs(model.module, micro_batch))
                    gained += 0 if micro_batch.is_filler else micro_batch.reward.sum()
            for _ in range(EPOCHS):
                for micro_batch, before in zip(step, old, strict=True):
                    with nullcontext() if micro_batch.is_last else model.no_sync():
                        losses = clipped(log_probs(model, micro_batch), before, micro_batch)
                        loss = (losses * micro_batch.loss_weights).sum() * micro_batch.loss_scale
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            # The next rollouts come from these weights, and staleness is judged by their version.
            publish(model, weights, version=step.number + 1)
            stream.set_policy_version(step.number + 1)
            step.commit()
            # integration: end
            trained += step.num_samples
            dist.all_reduce(gained)
            say(f"step {step.number}: mean reward {gained / step.num_samples:.3f}")
        stream.finish()  # rollouts end, and so does the dispatcher
    say(f"trained on {trained} samples")
    dist.destroy_process_group()


def log_probs(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Of each token given those before it, [n, tokens]; the first of a sample has none: 0."""
    ids = micro_batch.input_ids
    found = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(found, (1, 0))


def clipped(new: Tensor, old: Tensor, micro_batch: MicroBatch) -> Tensor:
    """PPO's clipped objective as a loss of each token, [n, tokens]."""
    ratio, advantage = (new - old).exp(), micro_batch.advantage[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


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


def rollout(endpoint: str, weights: Path, groups: int) -> None:
    """Generate with the newest weights and push, a group a prompt; `push_group` waits for room."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, version, chance = Policy(), 0, random.Random(0)  # the weights that trainers begin with
    with RolloutProducer(endpoint) as producer, suppress(RunFinished):  # trainers have had enough
        for number in range(groups):
            version = refresh(model, version, weights)
            digit = chance.randrange(DIGITS)
            samples = score(generate(model, digit), digit)
            producer.push_group(
                [RolloutSample(fields, policy_version=version) for fields in samples],
                group_id=f"prompt-{number}",
            )
        producer.end_stream()


def refresh(model: Policy, version: int, path: Path) -> int:
    """Load the weights if there are newer ones; returns the version that the model has now."""
    if not path.exists():
        return version
    found = torch.load(path, weights_only=True)
    if found["version"] > version:
        model.load_state_dict(found["model"])
    return max(version, int(found["version"]))


@torch.no_grad()
def generate(model: Policy, digit: int) -> list[list[int]]:
    """Sample the answers to one prompt, each to its end token or to `MAX_TOKENS`."""
    ids = torch.full((GROUP_SIZE, 1), digit)
    for _ in range(MAX_TOKENS):
        ids = torch.cat([ids, model(ids)[:, -1].softmax(-1).multinomial(1)], dim=1)
    answers = ids[:, 1:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in answers]


def score(answers: list[list[int]], digit: int) -> list[dict[str, Any]]:
    """The fields of each answer's sample. Its reward is the share of it that says the digit."""
    rewards = torch.tensor([answer.count(digit) / len(answer) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return [
        {
            "input_ids": [digit, *answer],
            "loss_mask": [False] + [True] * len(answer),  # the prompt is no target
            "advantage": float(advantage),
            "reward": float(reward),
        }
        for answer, advantage, reward in zip(answers, advantages, rewards, strict=True)
    ]


def main() -> None:
    """One of the two roles."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=["train", "rollout"])
    parser.add_argument("--endpoint", default="127.0.0.1:7077")
    parser.add_argument("--weights", type=Path, default=Path("grpo-weights.pt"))
    parser.add_argument("--steps", type=int, help="that are trained; default: all that come")
    parser.add_argument("--groups", type=int, default=480, help="prompts that rollouts answer")
    args = parser.parse_args()
    if args.role == "train":
        train(args.endpoint, args.weights, args.steps)
    else:
        rollout(args.endpoint, args.weights, args.groups)


if __name__ == "__main__":
    main()
