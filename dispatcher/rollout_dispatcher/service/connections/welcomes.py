"""What a client is welcomed with."""

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.sample import Schema
from rollout_dispatcher.service.config.serve import ServeConfig


def of_producer(
    config: ServeConfig,
    effect: e.WelcomeProducer,
    decided: tuple[Schema, str] | None,
    run_id: str,
    *,
    opens_stores: bool,
) -> m.WelcomeProducer:
    """As the core has decided. decided: the run's schema, once there is one, and by whom."""
    stores = list(config.payload_stores) if opens_stores else []
    return m.WelcomeProducer(
        run_id=run_id,
        credits=effect.credits,
        max_payload_bytes=config.max_frame_bytes,
        payload_stores=stores,
        inline_limit=config.inline_limit if stores else None,
        schema_known=None if decided is None else schema_known(*decided),
        max_staleness=config.max_staleness,
        heartbeat_interval_s=config.heartbeat_interval,
    )


def of_rank(config: ServeConfig, effect: e.WelcomeRank, *, opens_stores: bool) -> m.WelcomeRank:
    """As the core has decided."""
    stores = list(config.payload_stores) if opens_stores else []
    return m.WelcomeRank(
        run_id=effect.run_id,
        generation=effect.generation,
        committed=effect.committed,
        max_open_steps=config.max_open_steps,
        layout=config.layout,
        payload_stores=stores,
        prefetch_bytes=config.prefetch_bytes if stores else None,
        max_staleness=config.max_staleness,
        sample_length_multiple=config.sample_length_multiple,
        heartbeat_interval_s=config.heartbeat_interval,
    )


def schema_known(schema: Schema, set_by: str) -> m.SchemaKnown:
    """The run's schema, for a producer."""
    return m.SchemaKnown(fields=m.field_headers(schema), set_by=set_by)
