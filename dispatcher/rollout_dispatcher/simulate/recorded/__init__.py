"""A recorded run: replayed under other windows, shown as it went, and as a trace for Perfetto."""
