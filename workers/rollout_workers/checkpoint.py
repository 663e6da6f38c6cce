"""A stream's part of a checkpoint: which run it belongs to, and after which step it was taken.

Plain integers and strings, so that whatever writes the checkpoint can write it.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from rollout_dispatcher.errors import CheckpointRefused
from rollout_dispatcher.protocol import messages as m

#: Of the state; a newer one is refused.
FORMAT = 1


def state_of(run_id: str, step: int) -> dict[str, int | str]:
    """The state after `step` of a run."""
    return {"format": FORMAT, "run_id": run_id, "step": step}


def position_of(state: Mapping[str, object]) -> m.CheckpointPosition:
    """Where a state was taken. Raises CheckpointRefused for what is no state of a stream."""
    found = state.get("format")
    if found != FORMAT:
        raise CheckpointRefused(
            f"the stream's state has format {found!r}, this release reads format {FORMAT}; load it "
            "with the release that saved it"
        )
    try:
        return m.CheckpointPosition.model_validate(
            {key: state.get(key) for key in ("run_id", "step")}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CheckpointRefused(
            f"this is no state of a stream: {first['loc'][0]}: {first['msg']}; hand "
            "load_state_dict what state_dict returned"
        ) from error
