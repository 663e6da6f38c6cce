"""`dispatcher serve` and `check-config`: load the config, then serve with it or print it."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial

from rollout_dispatcher.cli.options import (
    ADVANCED,
    Loaded,
    load_config,
    options_of,
    themes,
    toml_value,
)
from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.service.config.checks import notes
from rollout_dispatcher.service.config.serve import ServeConfig

DESCRIPTION = "Run the dispatcher. It serves until SIGTERM (drain, then stop) or a second one."

EPILOG = """\
Every option can also be set as DISPATCHER_<NAME> in the environment (commas separate lists) or as
<name> in the --config file (TOML; advanced ones in its table [advanced]): flags win over the
environment, that over the file. Write none to unset an option. Durations: 100ms, 2s, 5m. Sizes:
512KiB, 64MiB, 4GiB.

examples:
  packed micro-batches of 32768 tokens for 8 FSDP ranks:
    dispatcher serve --dp-size 8 --global-batch-size 512 --micro-batch-tokens 32768
  for other machines, with a secret and TLS (clients: DISPATCHER_TOKEN_FILE, tls://host:7077):
    dispatcher serve --dp-size 8 --global-batch-size 512 --micro-batch-tokens 32768 \\
        --listen 0.0.0.0:7077 --token-file token --tls-cert server.pem --tls-key server.key
  what would that use?
    dispatcher check-config --config serve.toml

signals:
  SIGTERM, SIGINT   drain, or with a journal stop: the next start goes on; the second quits at once
  SIGHUP            read the options again: --window, --max-wait, --max-imbalance and
                    --max-delay may change while it serves, others not
  SIGUSR1           log where the run stands

exit codes: 0 the stream ended, the DP ranks finished or everything was drained, 1 failure or a
shutdown that gave up accepted samples (the log names them), 2 usage or config
"""


def run(argv: Sequence[str]) -> int:
    """Serve until the run ends or a signal stops it."""
    read = partial(load, argv, prog="dispatcher serve", description=DESCRIPTION)
    found = read()
    from rollout_dispatcher.service.server import run as serve  # noqa: PLC0415 (--help needs no server)

    return serve(found, read)


def load(argv: Sequence[str], *, prog: str, description: str) -> Loaded[ServeConfig]:
    """The config of `serve` for these arguments, in this environment."""
    return load_config(
        ServeConfig, argv, os.environ, prog=prog, description=description, epilog=EPILOG
    )


def check(argv: Sequence[str]) -> int:
    """Print the config as TOML, with the source of each value. Raises ConfigError.

    The output is a valid file for `--config`, with the same result. `--json` prints one object:
    values and sources by option, notes, and all problems.
    """
    about = "Check the options of serve and print the config that results, as TOML or with --json."
    words = [word for word in argv if word != "--json"]
    as_json = len(words) < len(argv)
    try:
        loaded = load(words, prog="dispatcher check-config", description=about)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"valid": False, "problems": list(error.problems)}, indent=1))
        raise
    print(as_object(loaded) if as_json else "\n".join(render(loaded)))
    return 0


def as_object(loaded: Loaded[ServeConfig]) -> str:
    """One JSON object; options that are unset have their derived values."""
    values = loaded.config.model_dump(mode="json", include=set(options_of(ServeConfig)))
    derived = {name: value for name, value in _derived(loaded).items() if values[name] is None}
    options = {
        name: {
            "value": derived.get(name, value),
            "source": "derived" if name in derived else loaded.sources.get(name, "default"),
        }
        for name, value in values.items()
    }
    found = {"valid": True, "options": options, "notes": list(notes(loaded.config))}
    return json.dumps(found, indent=1)


def _derived(loaded: Loaded[ServeConfig]) -> dict[str, int]:
    """Values of unset options that follow from others."""
    return {
        "buffer_capacity": loaded.config.buffer_samples,
        "buffer_bytes": loaded.config.buffer_memory,
        "blocked_push_bytes": loaded.config.held_memory,
        "referenced_bytes": loaded.config.referenced_capacity,
        "max_delay": loaded.config.skips_bound,
        "outlier_max_delay": loaded.config.skips_bound,
    }


def render(loaded: Loaded[ServeConfig]) -> Iterator[str]:
    """Lines of TOML, with notes on useless settings as comments."""
    derived = _derived(loaded)
    gap = ""
    for advanced in (False, True):
        if advanced:
            yield f"\n[{ADVANCED}]"
            gap = ""
        for theme, fields in themes(ServeConfig, advanced=advanced).items():
            yield f"{gap}# {theme}"
            gap = "\n"
            for name, field in fields.items():
                value = getattr(loaded.config, name)
                if (
                    value is None
                ):  # a comment: as a value it would not follow other options any more
                    shown = derived.get(name, "none")
                    yield f"# {name} = {shown}" + ("  # derived" if name in derived else "")
                else:
                    source = loaded.sources.get(name, "default")
                    yield f"{name} = {toml_value(field, value)}  # {source}"
    for note in notes(loaded.config):
        yield f"\n# note: {note}"
