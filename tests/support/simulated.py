"""What `dispatcher simulate --json` prints, as an object."""

import json

from pydantic import TypeAdapter

from rollout_dispatcher.simulate.result import FORMAT, Result


def result_of(text: str) -> Result:
    """The inverse of `Result.to_json`."""
    data = json.loads(text)
    assert data.pop("format") == FORMAT
    found: Result = TypeAdapter(Result).validate_python(data)
    return found
