"""Times of micro-batches on this rank, and their part in collectives."""
