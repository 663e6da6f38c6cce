"""What a DP rank has to say and has not said yet, in the order in which things happened.

The newest of a kind suffices, where nothing else was to be said since.
"""

from rollout_dispatcher.protocol import messages as m

#: Of these each is said, whatever was said before.
SAID_EACH = (m.Prepared, m.Unresolved, m.StepTimes)


class Unsaid:
    """Messages that wait to be sent."""

    def __init__(self) -> None:
        self._messages: list[m.Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: m.Message) -> None:
        """Say it after the others."""
        if self._messages and _replaces(message, self._messages[-1]):
            self._messages.pop()
        self._messages.append(message)

    def put_with_commit(self, times: m.StepTimes) -> bool:
        """Tell what a pass took in the commit of its step; returns whether that was the last one.

        It costs both sides less than a message of its own.
        """
        commit = self._messages[-1] if self._messages else None
        if not isinstance(commit, m.Commit) or commit.step != times.step:
            return False
        told = [*(commit.times or ()), times]
        if len(told) > m.MAX_PASSES or sum(len(each.busy_s) for each in told) > m.MAX_TIMED:
            return False
        self._messages[-1] = m.Commit(step=commit.step, times=told)
        return True

    def take(self) -> m.Message:
        """The next one, which is said now; IndexError if there is none."""
        return self._messages.pop(0)

    def clear(self) -> None:
        """Say none of them."""
        self._messages.clear()


def _replaces(message: m.Message, before: m.Message) -> bool:
    """Whether a message says all that the one before it said."""
    if isinstance(message, m.PolicyVersion) and isinstance(before, m.PolicyVersion):
        return message.first_step == before.first_step
    if isinstance(before, m.Commit) and before.times:
        return False
    return type(message) is type(before) and not isinstance(message, SAID_EACH)
