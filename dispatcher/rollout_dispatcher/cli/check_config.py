"""`dispatcher check-config`: print the effective config as TOML, with the source of each value.

What it prints can be saved and given back with `--config`: it yields the same config.
"""

from collections.abc import Iterator, Sequence

from rollout_dispatcher.cli.fields import toml_value
from rollout_dispatcher.cli.options import Loaded
from rollout_dispatcher.cli.serve import load
from rollout_dispatcher.service.config.checks import notes
from rollout_dispatcher.service.config.serve import ServeConfig

DESCRIPTION = "Check the options of serve and print the config that results, as TOML."


def run(argv: Sequence[str]) -> int:
    """Print the config; one that is wrong has raised before that."""
    print("\n".join(render(load(argv, prog="dispatcher check-config", description=DESCRIPTION))))
    return 0


def render(loaded: Loaded[ServeConfig]) -> Iterator[str]:
    """Lines of TOML, and as comments what in it can be of no use."""
    derived = {
        "buffer_capacity": loaded.config.buffer_samples,
        "buffer_bytes": loaded.config.buffer_memory,
        "held_bytes": loaded.config.held_memory,
        "referenced_bytes": loaded.config.referenced_capacity,
        "max_skips": loaded.config.skips_bound,
        "outlier_max_skips": loaded.config.skips_bound,
    }
    heading = ""
    for name, field in ServeConfig.model_fields.items():
        if name in ServeConfig.HEADINGS:
            yield f"{heading}# {ServeConfig.HEADINGS[name]}"
            heading = "\n"
        value = getattr(loaded.config, name)
        if value is None:  # a comment: written out, it would stay when what it follows from moves
            shown = derived.get(name, "none")
            yield f"# {name} = {shown}" + ("  # derived" if name in derived else "")
        else:
            yield f"{name} = {toml_value(field, value)}  # {loaded.sources.get(name, 'default')}"
    for note in notes(loaded.config):
        yield f"\n# note: {note}"
