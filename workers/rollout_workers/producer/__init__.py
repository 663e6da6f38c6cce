"""`RolloutProducer` and `AsyncRolloutProducer`: samples in, an outcome for each out."""
