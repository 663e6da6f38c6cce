"""What a client is welcomed with, as far as the terms that were agreed with it go."""

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.versions import (
    FEEDBACK,
    PADDING,
    RAGGED,
    REFERENCES,
    SCHEMA,
    Terms,
)
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.service.config.serve import ServeConfig


def of_producer(
    config: ServeConfig,
    terms: Terms,
    effect: e.WelcomeProducer,
    decided: tuple[Schema, str] | None,
    run_id: str,
) -> m.WelcomeProducer:
    """As the core has decided. decided: the run's schema, once there is one, and by whom."""
    stores = _stores(config, terms)
    return m.WelcomeProducer(
        version=terms.version,
        capabilities=sorted(terms.capabilities),
        run_id=run_id,
        credits=effect.credits,
        max_payload_bytes=config.max_frame_bytes,
        payload_stores=stores,
        inline_limit=config.inline_limit if stores else None,
        schema_known=schema_known(terms, decided),
        max_staleness=config.max_staleness if FEEDBACK in terms.capabilities else None,
        heartbeat_interval_s=config.heartbeat_interval,
    )


def of_rank(config: ServeConfig, terms: Terms, effect: e.WelcomeRank) -> m.WelcomeRank:
    """As the core has decided."""
    stores = _stores(config, terms)
    padded = PADDING in terms.capabilities
    return m.WelcomeRank(
        version=terms.version,
        capabilities=sorted(terms.capabilities),
        run_id=effect.run_id,
        generation=effect.generation,
        committed=effect.committed,
        max_open_steps=config.max_open_steps,
        layout=config.layout,
        payload_stores=stores,
        prefetch_bytes=config.prefetch_bytes if stores else None,
        max_staleness=config.max_staleness,
        sample_length_multiple=config.sample_length_multiple if padded else None,
        heartbeat_interval_s=config.heartbeat_interval,
    )


def schema_known(terms: Terms, decided: tuple[Schema, str] | None) -> m.SchemaKnown | None:
    """The run's schema, once it is decided, for a producer that can be told of it."""
    if SCHEMA not in terms.capabilities or decided is None:
        return None
    schema, set_by = decided
    if schema.ragged and RAGGED not in terms.capabilities:
        return None
    return m.SchemaKnown(fields=m.field_headers(schema), set_by=set_by)


def _stores(config: ServeConfig, terms: Terms) -> list[str]:
    """The payload stores that a client may open, if it can."""
    return list(config.payload_stores) if REFERENCES in terms.capabilities else []
