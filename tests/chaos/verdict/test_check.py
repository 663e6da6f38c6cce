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
    start, size = 100.0 * launch, max(map(len, steps.values()), default=2)
    ranks = [RankHistory(launch, rank, generation=launch + 1, began=start) for rank in range(size)]
    for after, (step, plan) in enumerate(steps.items(), start=1):
        size = sum(map(len, plan))
        for one, samples in zip(ranks, plan, strict=True):
            own = len(samples)
            one.takes[step] = Take(start + after, f"digest {plan}", 1, size, samples, own, size)
            if (one.rank, step) not in uncommitted:
                one.committing[step] = one.committed[step] = start + after + 0.5
    return ranks


def history(*groups: list[RankHistory], acknowledged: str = "", **more: object) -> History:
    """A run that got to its end; samples are letters, pushed and acknowledged at time 0."""
    names = dict.fromkeys(acknowledged, 0.0)
    taken = {n for ranks in groups for one in ranks for t in one.takes.values() for n in t.samples}
    found = History(
        max_open_steps=OPEN_STEPS,
        longest_wait=50,
        batch=2,
        most_buffered=20,
        ranks=[one for ranks in groups for one in ranks],
        producers=[ProducerHistory(dict.fromkeys(taken, 0.0) | names, names)],
    )
    return replace(found, **more)  # type: ignore[arg-type]


def resumed(ranks: list[RankHistory], after: int) -> list[RankHistory]:
    """The same group, which has loaded a checkpoint taken after that step."""
    for one in ranks:
        one.resumed = after
    return ranks


def final(samples: int, steps: int, dropped: int = 0, **more: object) -> dict[str, object]:
    """/statusz at the end."""
    return {
        "accepted": samples + dropped,
        "samples_committed": samples,
        "steps_committed": steps,
        "samples_rewound": 0,
        "steps_rewound": 0,
        "steps_lost": 0,
        "steps_retained": 0,
        "open_group_samples": 0,
        "pushes_held": 0,
        "run_state": "running",
        "dropped": {"stale": dropped},
        "buffered": 0,
        "in_flight": 0,
        "balanced": True,
    } | more


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


def test_a_push_without_an_answer_that_a_rank_took_exists() -> None:
    first = group(0, {0: (("a", "c"), ("b",))}, uncommitted=((1, 0),))
    found = check(
        history(first, group(1, {0: (("a",), ("b",))}), acknowledged="ab", final=final(2, 1))
    )
    assert found.lost == ("c",)


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
    found = " ".join(check(history(first, group(1, {0: CD}))).disagreements)
    assert "again with another plan" in found
    assert "several digests" in found
    assert "with other samples" in found


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


def test_the_loss_totals_of_a_step_are_those_of_its_samples() -> None:
    ranks = group(0, {0: AB})
    for one in ranks:
        one.takes[0] = replace(one.takes[0], loss_tokens=7)
    assert "7 loss tokens" in check(history(ranks)).disagreements[0]


def test_after_a_rewind_steps_come_again_and_count_once() -> None:
    steps: dict[int, Plan] = {0: AB, 1: CD, 2: (("e",), ("f",)), 3: (("g",), ("h",))}
    again = resumed(group(1, {at: steps[at] for at in (1, 2, 3)}), 0)
    status = final(8, 4) | {"samples_committed": 14, "steps_committed": 7}
    told = {"samples_rewound": 6, "steps_rewound": 3}
    calm = history(group(0, steps), again, acknowledged="abcdefgh", final=status | told)
    assert check(calm).clean
    assert "steps_rewound is 0" in " ".join(check(replace(calm, final=status)).disagreements)


def test_a_step_that_a_rewind_forgets_is_lost() -> None:
    again = resumed(group(1, {2: (("e",), ("f",))}), 0)
    verdict = check(history(group(0, {0: AB, 1: CD}), again, acknowledged="abcdef"))
    assert verdict.lost == ("c", "d")
    assert "was to go on after 0" in verdict.disagreements[0]


def test_what_a_checkpoint_covers_must_not_come_again() -> None:
    again = resumed(group(1, {0: AB, 1: CD}), 0)
    assert check(history(group(0, {0: AB, 1: CD}), again)).duplicated == ("a", "b")


def test_another_number_of_ranks_gets_the_same_samples_in_other_plans() -> None:
    first = group(0, {0: AB, 1: CD}, uncommitted=((1, 1),))
    assert check(history(first, group(1, {1: (("c",), (), ("d",))}))).clean
    missing = check(history(first, group(1, {1: (("c",), (), ())})))
    assert "again with other samples: ['d']" in " ".join(missing.disagreements)


def test_steps_that_a_saved_checkpoint_covers_are_not_retained() -> None:
    ranks = group(0, {0: AB, 1: CD})
    ranks[0].saved = 0
    found = history(ranks, acknowledged="abcd", final=final(4, 2, steps_retained=1))
    assert check(found).clean
    kept = replace(found, final=final(4, 2, steps_retained=2))
    assert "steps_retained is 2" in check(kept).disagreements[0]


def test_the_books_balance_at_every_look() -> None:
    found = history(group(0, {0: AB}), looks=[final(2, 1) | {"accepted": 3}])
    assert "accepted is 3" in check(found).disagreements[0]


def test_a_buffer_beyond_its_cap_is_overfull() -> None:
    assert check(history(looks=[final(0, 0, buffered=21) | {"accepted": 21}])).overfull
    assert not check(history(looks=[final(0, 0, buffered=20) | {"accepted": 20}])).overfull


def test_ranks_that_wait_while_samples_are_here_are_stuck() -> None:
    ranks = group(0, {0: AB})
    assert check(history(ranks, stuck=final(2, 1, buffered=2))).stuck
    assert not check(history(ranks, stuck=final(2, 1, buffered=1))).stuck
    assert not check(history(ranks)).stuck
    ended = check(history(ranks, stuck=final(2, 1), ended=True))
    assert "the stream was ended" in ended.stuck[0]


# -- payloads by reference ------------------------------------------------------------------------


def again(ranks: list[RankHistory], step: int, attempt: int = 1) -> list[RankHistory]:
    """The same group, which was given that step as a later attempt."""
    for one in ranks:
        take = one.takes[step]
        one.takes[step] = replace(take, attempt=attempt, digest=f"{take.digest}, {attempt}")
    return ranks


def gone(count: int) -> dict[str, object]:
    """/statusz at the end: two samples are committed, and so many dropped as they were gone."""
    return final(2, 1, count) | {"dropped": {"unresolved": count}}


def test_what_was_removed_may_be_dropped_and_its_step_planned_again() -> None:
    before = group(0, {0: AB}, uncommitted=((0, 0), (1, 0)))
    after = again(group(1, {0: (("a",), ("c",))}), 0)
    found = history(before, after, acknowledged="abc", final=gone(1), deleted={"b"})
    assert check(found).clean
    assert check(replace(found, deleted=set())).lost == ("b",)


def test_what_nobody_removed_is_not_dropped_as_gone() -> None:
    found = history(group(0, {0: AB}), acknowledged="ab", final=gone(1))
    assert "could be" in "".join(check(found).disagreements)


def test_a_later_attempt_does_not_come_before_an_earlier_one() -> None:
    before = again(group(0, {0: AB}, uncommitted=((0, 0),)), 0)
    found = history(before, group(1, {0: AB}), acknowledged="ab", final=final(2, 1))
    assert "came as attempt 0 after 1" in "".join(check(found).disagreements)


def test_a_sample_that_a_void_attempt_had_may_come_in_another_step() -> None:
    before = group(0, {0: AB}, uncommitted=((0, 0), (1, 0)))
    after = again(group(1, {0: (("a",), ("c",)), 1: (("b",), ("d",))}), 0)
    found = history(before, after, acknowledged="abcd", final=final(4, 2))
    assert check(found).clean


def test_a_group_is_trained_whole_or_not_at_all() -> None:
    found = history(group(0, {0: AB, 1: CD}), acknowledged="abcd", final=final(4, 2))
    found.producers[0].groups = [["a", "b"], ["x", "y"]]
    assert check(found).clean
    found.producers[0].groups = [["a", "c"]]
    assert "not trained whole" in "".join(check(found).disagreements)


def test_what_is_in_a_group_with_what_was_removed_goes_with_it() -> None:
    found = history(group(0, {0: AB}), acknowledged="abxy", final=gone(2), deleted={"x"})
    found.producers[0].groups = [["x", "y"]]
    assert check(found).clean


def test_an_object_that_is_left_is_leaked() -> None:
    left = {"p.1/0": ["a", "b"], "p.1/2": []}
    found = history(group(0, {0: AB}), acknowledged="ab", final=final(2, 1), left=left)
    assert check(found).leaked == ("p.1/0", "p.1/2")


def test_an_object_that_a_rewind_may_need_is_not_leaked() -> None:
    ranks = group(0, {0: AB, 1: CD})
    ranks[0].saved = 0
    left = {"p.1/0": ["a", "b"], "p.1/2": ["b", "c"]}
    told = final(4, 2, steps_retained=1)
    assert check(history(ranks, acknowledged="abcd", final=told, left=left)).leaked == ("p.1/0",)
