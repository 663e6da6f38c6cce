"""The checker, on histories that nobody lived through: it finds each fault, and only faults."""

from dataclasses import replace

from tests.chaos.verdict.check import check
from tests.chaos.verdict.history import History, ProducerHistory, RankHistory, Take

Plan = tuple[tuple[str, ...], ...]
OPEN_STEPS = 2


def group(
    launch: int, steps: dict[int, Plan], *, uncommitted: tuple[tuple[int, int], ...] = ()
) -> list[RankHistory]:
    """A process group that took and committed steps, but for (rank, step) in `uncommitted`.

    Group n begins at time 100 n and takes one step a second.
    """
    start = 100.0 * launch
    ranks = [RankHistory(launch, rank, generation=launch + 1, began=start) for rank in range(2)]
    for after, (step, plan) in enumerate(steps.items(), start=1):
        size = sum(map(len, plan))
        for one, samples in zip(ranks, plan, strict=True):
            one.takes[step] = Take(start + after, f"digest {plan}", 1, size, samples)
            if (one.rank, step) not in uncommitted:
                one.committing[step] = one.committed[step] = start + after + 0.5
    return ranks


def history(*groups: list[RankHistory], acknowledged: str = "", **more: object) -> History:
    """A run that got to its end; samples are letters, pushed and acknowledged at time 0."""
    names = dict.fromkeys(acknowledged, 0.0)
    taken = {n for ranks in groups for one in ranks for t in one.takes.values() for n in t.samples}
    found = History(
        dp_size=2,
        max_open_steps=OPEN_STEPS,
        longest_wait=50,
        ranks=[one for ranks in groups for one in ranks],
        producers=[ProducerHistory(dict.fromkeys(taken, 0.0) | names, names)],
    )
    return replace(found, **more)  # type: ignore[arg-type]


def final(samples: int, steps: int, dropped: int = 0) -> dict[str, object]:
    """/statusz at the end."""
    return {
        "accepted": samples + dropped,
        "samples_committed": samples,
        "steps_committed": steps,
        "dropped": {"stale": dropped},
        "buffered": 0,
        "in_flight": 0,
        "balanced": True,
    }


AB, CD = (("a",), ("b",)), (("c",), ("d",))


def test_a_run_without_a_fault_is_clean() -> None:
    verdict = check(history(group(0, {0: AB, 1: CD}), acknowledged="abcd", final=final(4, 2)))
    assert verdict.clean
    assert verdict.committed == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_an_acknowledged_sample_that_is_nowhere_is_lost() -> None:
    verdict = check(history(group(0, {0: AB}), acknowledged="abc", final=final(2, 1)))
    assert verdict.lost == ("c",)


def test_an_acknowledged_sample_may_have_been_dropped_for_a_counted_reason() -> None:
    verdict = check(history(group(0, {0: AB}), acknowledged="abc", final=final(2, 1, dropped=1)))
    assert verdict.clean


def test_a_push_without_an_answer_may_exist_or_not() -> None:
    assert check(history(group(0, {0: AB}), acknowledged="a", final=final(2, 1))).clean


def test_what_the_next_group_is_not_given_again_was_committed() -> None:
    verdict = check(
        history(group(0, {0: AB}), group(1, {1: CD}), acknowledged="abcd", final=final(4, 2))
    )
    assert verdict.clean


def test_what_the_next_group_is_given_again_was_not_committed() -> None:
    """Both ranks had begun to commit; the dispatcher heard of it from one at most."""
    verdict = check(
        history(group(0, {0: AB}), group(1, {0: AB, 1: CD}), acknowledged="abcd", final=final(4, 2))
    )
    assert verdict.clean


def test_a_step_that_nobody_finished_and_nobody_got_again_is_lost() -> None:
    first = group(0, {0: AB}, uncommitted=((1, 0),))
    verdict = check(history(first, group(1, {1: CD}), acknowledged="abcd"))
    assert verdict.lost == ("a", "b")


def test_a_commit_after_the_successor_began_does_not_count() -> None:
    first = group(0, {0: AB})
    first[1].committing[0] = 150.0
    verdict = check(history(first, group(1, {1: CD}), acknowledged="abcd"))
    assert verdict.lost == ("a", "b")


def test_a_sample_in_two_steps_is_duplicated() -> None:
    verdict = check(history(group(0, {0: AB, 1: (("c",), ("a",))}), acknowledged="abc"))
    assert verdict.duplicated == ("a",)


def test_a_sample_twice_in_one_step_is_duplicated() -> None:
    assert check(history(group(0, {0: (("a",), ("a",))}))).duplicated == ("a",)


def test_a_step_that_was_certainly_committed_must_not_come_again() -> None:
    first = group(0, {0: AB, 1: CD, 2: (("e",), ("f",))})
    assert check(history(first, group(1, {0: AB}))).duplicated == ("a", "b")
    assert not check(history(first, group(1, {1: CD}))).duplicated


def test_ranks_with_different_plans_of_a_step_disagree() -> None:
    ranks = group(0, {0: AB})
    ranks[1].takes[0] = replace(ranks[1].takes[0], micro_batches=2)
    assert "different plans of step 0" in check(history(ranks)).disagreements[0]


def test_a_step_that_comes_again_must_be_the_same() -> None:
    first = group(0, {0: AB}, uncommitted=((1, 0),))
    assert "again with another plan" in check(history(first, group(1, {0: CD}))).disagreements[0]


def test_a_rank_takes_every_step_in_order() -> None:
    assert "took 2 after 0" in check(history(group(0, {0: AB, 2: CD}))).disagreements[0]


def test_a_generation_belongs_to_one_group_and_rises() -> None:
    second = group(1, {1: CD})
    for one in second:
        one.generation = 1
    assert "has generations [1]" in check(history(group(0, {0: AB}), second)).disagreements[0]


def test_an_old_rank_that_returns_must_be_fenced() -> None:
    groups = group(0, {0: AB}), group(1, {1: CD})
    returned = {(0, 1)}
    assert "was not fenced" in check(history(*groups, returned=returned)).disagreements[0]
    groups[0][1].fenced = 180.0
    assert check(history(*groups, returned=returned)).clean


def test_nobody_is_fenced_without_a_successor() -> None:
    ranks = group(0, {0: AB})
    ranks[0].fenced = 50.0
    assert "no newer group" in check(history(ranks)).disagreements[0]


def test_a_sample_that_was_withdrawn_is_not_trained() -> None:
    found = history(group(0, {0: AB}))
    found.producers[0].withdrawn.add("a")
    assert "withdrawn" in check(found).disagreements[0]


def test_the_dispatchers_own_count_must_agree() -> None:
    verdict = check(history(group(0, {0: AB}), acknowledged="ab", final=final(3, 1)))
    assert "samples_committed is 3" in " ".join(verdict.disagreements)


def test_a_sample_that_waits_for_too_many_steps_starves() -> None:
    steps: dict[int, Plan] = {at: ((f"x{at}",), (f"y{at}",)) for at in range(5)}
    found = history(group(0, steps | {5: AB}), acknowledged="a", longest_wait=5)
    assert "sample a" in check(found).starved[0]
    assert not check(replace(found, longest_wait=6)).starved
