"""`dispatcher serve` with settings that are no options, which tests have smaller.

python -m tests.support.fixed '{"handshake_timeout": "200ms"}' serve --dp-size 2 ...
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from rollout_dispatcher.cli.options import Loaded
from rollout_dispatcher.cli.serve import load
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.server import run


def main(argv: Sequence[str]) -> int:
    """Serve; returns the exit code."""
    text, _, *flags = argv
    fixed = {name: None if value == "none" else value for name, value in json.loads(text).items()}

    def read() -> Loaded[ServeConfig]:
        found = load(flags, prog="dispatcher serve", description="")
        return replace(found, config=ServeConfig.model_validate(dict(found.config) | fixed))

    return run(read(), read)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
