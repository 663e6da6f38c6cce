"""The samples of one request: what became of each, and those that may be tried again."""

from typing import Final

from aiohttp import web

from rollout_dispatcher.errors import RunFinished
from rollout_dispatcher.sample import Outcome, Sample
from rollout_dispatcher.service.http.bodies.pieces import Work
from rollout_dispatcher.service.router import Router

#: What a producer is told to wait when a cap is reached; a step usually takes longer than this.
RETRY_AFTER_SECONDS = 1
#: Samples that the core is told of at once; it takes a millisecond or so.
PUSHED_AT_ONCE: Final = 64
_STATUS: Final = {Outcome.REFUSED: 422, Outcome.FULL: 429}


class SamplePush:
    """Samples that are pushed, again and again if need be. named: their ids were given."""

    def __init__(self, samples: list[Sample], *, named: bool) -> None:
        self._left = dict(enumerate(samples))
        self._outcomes = [Outcome.FULL] * len(samples)
        self._errors: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._named = named
        versions = {sample.judged_version for sample in samples}
        self._oldest = min((version for version in versions if version is not None), default=None)

    @property
    def is_full(self) -> bool:
        """Whether some of them found no room."""
        return bool(self._left)

    @property
    def nbytes(self) -> int:
        """Of memory, that those take."""
        return sum(sample.memory_bytes for sample in self._left.values())

    def attempt(self, router: Router, *, all_of_them: bool) -> Work[None]:
        """Push what is left; unless `all_of_them`, up to where nothing finds room."""
        left = list(self._left)
        for first in range(0, len(left), PUSHED_AT_ONCE):
            if first:
                yield
            some = left[first : first + PUSHED_AT_ONCE]
            answer = router.push_now(tuple(self._left[at] for at in some), named=self._named)
            for at, outcome in zip(some, answer.outcomes, strict=True):
                self._outcomes[at] = outcome
                if outcome is not Outcome.FULL:
                    del self._left[at]
            self._errors |= {str(some[index]): text for index, text in answer.errors.items()}
            self._reasons |= {str(some[index]): word for index, word in answer.reasons.items()}
            if not all_of_them and set(answer.outcomes) == {Outcome.FULL}:
                return

    def answer(self, router: Router) -> web.Response:
        """What is said of them, and of where the trainer is."""
        worst = max((_STATUS.get(outcome, 200) for outcome in set(self._outcomes)), default=200)
        if RunFinished.code in self._reasons.values():
            worst = 410
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if worst == 429 else {}
        standing = router.core.standing
        body = {
            "outcomes": self._outcomes,
            "errors": self._errors,
            "reasons": self._reasons,
            "policy_version": standing.policy_version,
            "expected_version": standing.expected_version,
            "staleness": standing.staleness(self._oldest),
            "max_staleness": router.config.max_staleness,
            "remaining": standing.remaining,
        }
        return web.json_response(body, status=worst, headers=headers)
