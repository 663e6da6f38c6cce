"""What a planner refuses, and the base of every error of this distribution."""

from typing import ClassVar


class DispatcherError(Exception):
    """Base of the tree."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False


class ConfigError(DispatcherError):
    """Settings contradict each other or cannot be satisfied.

    problems: each thing that is wrong, in a line of its own.
    """

    code = "config"

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PlanError(DispatcherError, ValueError):
    """A window cannot be planned as asked.

    Also a ValueError: planning is called by trainers that know nothing of this tree.
    """

    code = "plan"


_LONGER_BUDGET = "raise --micro-batch-tokens, truncate the rollout, or set --oversize alone"
_ROOM_FOR_GROUPS = "raise --micro-batch-tokens, set --oversize alone, or --groups rank"


class SampleTooLong(PlanError):
    """A sample has more tokens than one micro-batch may hold."""

    code = "too-long"

    def __init__(self, tokens: int, budget: int, remedy: str = _LONGER_BUDGET) -> None:
        super().__init__(
            f"a sample of {tokens} tokens exceeds the micro-batch budget of {budget} tokens; "
            + remedy
        )
        self.tokens, self.budget = tokens, budget


class UnequalPartitions(PlanError, AssertionError):
    """Numbers cannot be split as asked, or are no lengths or costs.

    Also an AssertionError, which is what callers of verl's functions of the same names expect.
    """

    code = "unequal-partitions"


class GroupTooLong(PlanError):
    """A group has more tokens than the one micro-batch that it has to stay in may hold."""

    code = "group-too-long"

    def __init__(
        self, samples: int, tokens: int, budget: int, remedy: str = _ROOM_FOR_GROUPS
    ) -> None:
        super().__init__(
            f"a group of {samples} samples has {tokens} tokens, which exceeds the micro-batch "
            f"budget of {budget} tokens that it has to stay in; {remedy}"
        )
        self.samples, self.tokens, self.budget = samples, tokens, budget
