"""The functions in examples/seams beside what they replace: on batches of real lengths, at random.

    python -m tests.bench.seams [--batches 3] [--random 2000] [--only NAME] [--json FILE]

Ours is the code of those files, run. Theirs is their own code as well: verl's from the wheel that
`make bench-peers` unpacks, the others' from clones in build/bench/sources (slime, RL, TorchSpec); a
seam whose trainer is not there is left out, and that is printed. Budgets are the longest sample of
a trace, and of random cases up to four of the longest.

Excess is a step's time over an even share, less one, as ranks' clocks would have it: what ranks
wait, what they pad, and, for both, what it costs to begin each micro-batch under a budget. A batch
whose budget their micro-batches break is no comparison, and is counted.
"""

import argparse
import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_planner.types import IntArray, Layout, Sync
from tests.bench.cells import TRACES, read_trace
from tests.bench.rows import report
from tests.peers.adapters import nemo_rl, slime, torchspec, verl
from tests.peers.loading import UNPACKED, commit_of, load
from tests.peers.problem import Corner, Peer, Problem, Schedule, Solve, Unanswered, rate
from tests.peers.random_cases import budget, lengths, shape
from tests.peers.roster import SOURCES
from tests.support.seams import (
    DataProto,
    KVBatchMeta,
    ReplayBuffer,
    at_hand,
    module,
    row_numbers,
    seam,
    select,
)

SIZES = ((64, 8), (512, 16), (512, 64), (1024, 64))
NAMES = (
    "lineage_open_reasoning",
    "reasoning_gym_rlvr_g3",
    "azure2023_conv",
    "deepseek_r1_arc_g2",
    "tau_airline_agent_g4",
)
#: Samples of a micro-batch where there is no budget, and of a prompt group.
SIZE, GROUP = 2, 4
#: Steps that a sampler chooses for, and prompt groups that are ready, in those of a step.
STEPS, READY = 16, 1.25
#: Excess by which a case is lost.
LOST = 1e-3


@dataclass(frozen=True, slots=True)
class Row:
    """One seam and trace at one size, or its random cases; mean excess as ratios.

    furthest_behind: how far ours was behind at worst. lost: cases behind by more than `LOST`.
    over_budget: those left out, in which theirs breaks the budget, or refuses.
    """

    seam: str
    version: str
    lengths: str
    theirs: float
    ours: float
    furthest_behind: float
    lost: int
    cases: int
    over_budget: int


@dataclass(frozen=True, slots=True)
class Seam:
    """What is put to both. version: of what is replaced.

    each: what a rank's samples of a step are a multiple of.
    """

    name: str
    version: str | None
    theirs: Solve | None
    ours: Solve
    ask: Callable[..., Problem]
    each: int = 1
    steps: int = 1


# -- verl -------------------------------------------------------------------------------------


def verl_page(problem: Problem) -> Schedule:
    """`_balance_batch`, and then `rearrange_micro_batches` on each rank."""
    R, n, most = problem.dp_size, len(problem.lengths), problem.micro_batch_tokens
    actor = SimpleNamespace(
        strategy="fsdp" if problem.sync is Sync.MICRO_STEP else "megatron",
        use_dynamic_bsz=most is not None,
        ppo_max_token_len_per_gpu=most,
        ppo_micro_batch_size_per_gpu=problem.micro_batch_size,
    )
    trainer: Any = SimpleNamespace(
        _get_dp_size=lambda *_: R,
        actor_rollout_wg=None,
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor)),
    )
    batch = DataProto(row_numbers(problem.lengths.tolist()))
    seam("_balance_batch")["_balance_batch"](trainer, batch, {})
    rows, step = batch.batch["input_ids"][:, 0].tolist(), []
    cut = seam("rearrange_micro_batches", index_select_tensor_dict=select)
    for first in range(0, n, n // R):
        own = {name: value[first : first + n // R] for name, value in batch.batch.items()}
        if most is None:
            parts = in_runs(list(range(n // R)), problem.micro_batch_size or 1)
        else:
            _, parts = cut["rearrange_micro_batches"](own, most)
        step.append([[rows[first + i] for i in part] for part in parts])
    return step


def verl_fixed(solve: Solve, problem: Problem) -> Schedule:
    """Its equal ranks, cut in the order that it gives them: small samples at both ends."""
    step, costs = [], problem.costs.tolist()
    for [part] in solve(problem):
        rising = sorted(part, key=lambda i: (costs[i], i))
        step.append(in_runs(rising[::2] + rising[1::2][::-1], problem.micro_batch_size or 1))
    return step


def in_runs(rows: list[int], size: int) -> list[list[int]]:
    """Runs of so many."""
    return [rows[at : at + size] for at in range(0, len(rows), size)]


# -- slime ------------------------------------------------------------------------------------


def slime_page(problem: Problem) -> Schedule:
    """`build_dp_schedule`."""
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=problem.micro_batch_tokens,
        micro_batch_size=None,
    )  # fmt: skip
    n = len(problem.lengths)
    ranks, cuts, _, _ = seam("build_dp_schedule")["build_dp_schedule"](
        args, {"dp_size": problem.dp_size, "cp_size": 1, "vpp_size": 1},
        problem.lengths.tolist(), global_batch_size=n, rollout_indices=list(range(n)),
    )  # fmt: skip
    return [
        [[rank[i] for i in part] for part in parts] for rank, parts in zip(ranks, cuts, strict=True)
    ]


# -- NeMo-RL ----------------------------------------------------------------------------------


def shards(meta: KVBatchMeta, problem: Problem) -> Schedule:
    """`shard_meta_for_dp` of the page, of a step whose samples are named by their index."""
    packing = {
        "max_tokens_per_microbatch": problem.micro_batch_tokens,
        "sequence_length_pad_multiple": 1,
    }
    with at_hand({"nemo_rl.data_plane": module("nemo_rl.data_plane", preshard=None)}):
        shard = seam("shard_meta_for_dp")["shard_meta_for_dp"]
    metas, _ = shard(meta, dp_world=problem.dp_size, sequence_packing_args=packing)
    return [
        [meta.sample_ids[a:b] for a, b in meta.extra_info["micro_batch_indices"][0]]
        for meta in metas
    ]


def nemo_page(problem: Problem) -> Schedule:
    """One step, sharded."""
    tokens = problem.lengths.tolist()
    return shards(KVBatchMeta(list(range(len(tokens))), tokens), problem)


def sampled(make: Callable[[Any, Problem], Any], problem: Problem) -> Schedule:
    """Steps that a sampler chooses from prompt groups as they come, all sharded by the page."""
    tokens = problem.lengths.tolist()
    groups, each = in_runs(list(range(len(tokens))), GROUP), len(tokens) // GROUP // STEPS
    buffer, run = ReplayBuffer(), [list[list[int]]() for _ in range(problem.dp_size)]
    sampler = make(buffer, problem)
    for version in range(STEPS):
        while groups and len(buffer.meta_list) < each * READY:
            rows = groups.pop(0)
            buffer.add(KVBatchMeta(rows, [tokens[i] for i in rows]), version)
        meta, _ = asyncio.run(
            sampler.select(
                current_train_weight=version, min_prompt_groups=each, max_prompt_groups=each
            )
        )
        for rank, parts in zip(run, shards(meta, problem), strict=True):
            rank.extend(map(list, parts))
    return run


def samplers() -> tuple[Solve | None, Solve]:
    """Theirs and ours, on the same base class: theirs, or nothing where it is not there."""
    name = "nemo_rl.algorithms.async_utils.staleness_sampler"
    needs = ("nemo_rl.algorithms.async_utils.replay_buffer", "nemo_rl.data_plane")
    if not (SOURCES / "RL" / "nemo_rl").exists():
        return None, sampled_by_nobody
    theirs = load(SOURCES / "RL", name, needs)

    def page(buffer: Any, problem: Problem) -> Any:
        with at_hand({name: theirs}):
            made = seam("BalancedSampler")["BalancedSampler"]
        tokens = problem.micro_batch_tokens
        return made(
            buffer, dp_size=problem.dp_size, micro_batch_tokens=tokens, max_staleness_versions=2
        )

    def own(buffer: Any, _: Problem) -> Any:
        return theirs.WindowedSampler(buffer, max_staleness_versions=2)

    return partial(sampled, own), partial(sampled, page)


def sampled_by_nobody(problem: Problem) -> Schedule:
    """Where there is nothing to replace."""
    raise Unanswered(f"{len(problem.lengths)} samples, and no sampler")


# -- TorchSpec --------------------------------------------------------------------------------


def dispatched(controller: type[Any], dispatch: Any, problem: Problem) -> Schedule:
    """An optimizer step's dispatches, each a micro-batch a rank."""
    n, R, size = len(problem.lengths), problem.dp_size, problem.micro_batch_size or 1
    args = SimpleNamespace(per_dp_rank_batch_size=size, global_batch_size=n)
    made = controller(args, R)
    made.push_inference_results(
        [
            SimpleNamespace(
                data_id=str(row), mooncake_key=row, tensor_shapes={"input_ids": (length,)},
                tensor_dtypes=None, packed_loss_mask=None,
            )
            for row, length in enumerate(problem.lengths.tolist())
        ]
    )  # fmt: skip
    for _ in range(n // (R * size)):
        assert dispatch(made)
    return [
        in_runs([queue.get().mooncake_key for _ in range(queue.qsize())], size)
        for queue in made.train_queues
    ]


def dispatches() -> tuple[Solve | None, Solve]:
    """Theirs and ours, on their controller: nothing where it is not there."""
    if not (SOURCES / "TorchSpec" / "torchspec").exists():
        return None, sampled_by_nobody
    found = torchspec.controller("ray")
    page = seam("try_dispatch_batch")["try_dispatch_batch"]
    return partial(dispatched, found, found.try_dispatch_batch), partial(dispatched, found, page)


# -- all of them ------------------------------------------------------------------------------


def under_budget(sync: Sync, tokens: IntArray, ranks: int, most: int) -> Problem:
    """Packed, under a token budget."""
    return Problem(tokens, ranks, sync=sync, micro_batch_tokens=most)


def of_fixed_size(tokens: IntArray, ranks: int, _: int) -> Problem:
    """So many samples a micro-batch, whatever they have."""
    return Problem(tokens, ranks, micro_batch_size=SIZE)


def in_buckets(tokens: IntArray, ranks: int, _: int) -> Problem:
    """Padded to the longest of a micro-batch, in buckets."""
    padded = -(-tokens // 256) * 256
    return Problem(padded, ranks, micro_batch_size=SIZE, layout=Layout.PADDED)


def known(peer: Peer | None) -> tuple[str | None, Mapping[Corner, Solve]]:
    """Its version and what it solves; nothing where it is not here."""
    return (None, {}) if peer is None else (peer.version, peer.solves)


def seams() -> list[Seam]:
    """All, with what they replace where it is there."""
    at, solves = known(verl.peer(UNPACKED))
    fixed = partial(verl_fixed, solves[Corner.EQUAL]) if at else None
    slimes_at, slimes = known(slime.peer(SOURCES / "slime"))
    rl, nemos = known(nemo_rl.peer(SOURCES / "RL"))
    spec = commit_of(SOURCES / "TorchSpec")
    step, micro_step = partial(under_budget, Sync.STEP), partial(under_budget, Sync.MICRO_STEP)
    return [
        Seam("verl FSDP", at, solves.get(Corner.BUDGET), verl_page, micro_step),
        Seam("verl Megatron", at, solves.get(Corner.BUDGET), verl_page, step),
        Seam("verl fixed size", at, fixed, verl_page, of_fixed_size, SIZE),
        Seam("slime", slimes_at, slimes.get(Corner.BUDGET), slime_page, step),
        Seam("NeMo-RL shards", rl, nemos.get(Corner.BUDGET), nemo_page, micro_step),
        Seam("NeMo-RL sampler", rl, *samplers(), micro_step, GROUP, STEPS),
        Seam("TorchSpec", spec, *dispatches(), in_buckets, SIZE),
    ]


def measure(all_seams: Iterable[Seam], batches: int, random: int) -> Iterator[Row]:
    """A row a seam, trace and size, and one of a seam's random cases."""
    for each in all_seams:
        for name in NAMES:
            path = TRACES / f"{name}.csv.gz"
            if not path.exists():
                print(f"{name} skipped: the trace is not here")
                continue
            tokens = np.maximum(read_trace(path), 1)
            for batch, ranks in SIZES:
                yield row(each, f"{name} {batch}/{ranks}", [
                    each.ask(batch_of(tokens, batch * each.steps, seed), ranks, int(tokens.max()))
                    for seed in range(batches)
                ])  # fmt: skip
        yield row(each, "random", [random_case(each, seed) for seed in range(random)])


def batch_of(tokens: IntArray, n: int, seed: int) -> IntArray:
    """Rows of a trace, a prompt group's next to each other as they are there."""
    starts = np.random.default_rng(seed).integers(len(tokens) // GROUP, size=n // GROUP)
    rows: IntArray = tokens[(starts[:, None] * GROUP + np.arange(GROUP)).ravel()]
    return rows


def random_case(each: Seam, seed: int) -> Problem:
    """Ranks, samples, lengths and budget at random."""
    rng = np.random.default_rng(seed)
    ranks, samples = shape(rng)
    samples = -(-samples // each.each) * each.each
    tokens = lengths(rng, ranks * samples * each.steps)
    return each.ask(tokens, ranks, budget(rng, tokens))


def row(each: Seam, name: str, problems: list[Problem]) -> Row:
    """Both asked; AssertionError if an answer loses a sample, ValueError if ours refuses."""
    found, over = [], 0
    assert each.theirs is not None
    assert each.version is not None
    for problem in problems:
        try:
            theirs = rate(problem, each.theirs(problem))
        except Unanswered:
            over += 1
            continue
        if theirs.over_cap:
            over += 1
            continue
        ours = rate(problem, each.ours(problem))
        assert not ours.over_cap
        found.append((theirs.priced - 1, ours.priced - 1))
    behind = [ours - theirs for theirs, ours in found]
    return Row(
        each.name, each.version, name,
        fmean(theirs for theirs, _ in found), fmean(ours for _, ours in found),
        max(behind), sum(each > LOST for each in behind), len(found), over,
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--random", type=int, default=2000, help="cases of all seams together")
    parser.add_argument("--only", default="", help="seams whose name has this")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args()
    there, known = [], [each for each in seams() if given.only in each.name]
    for each in known:
        if each.theirs is None:
            print(f"{each.name} skipped: the trainer's code is not in build/bench; see Makefile")
        else:
            there.append(each)
    report(measure(there, given.batches, -(-given.random // len(known))), line, given.json)


def line(found: Row) -> str:
    """As it is printed."""
    return (
        f"{found.seam:16} {found.lengths:32} theirs {100 * found.theirs:7.2f} %  ours "
        f"{100 * found.ours:7.2f} %  furthest behind {100 * found.furthest_behind:6.2f}  "
        f"lost {found.lost} of {found.cases}, {found.over_budget} over the budget"
    )


if __name__ == "__main__":
    main()
