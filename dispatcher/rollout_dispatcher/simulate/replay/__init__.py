"""Time in a what-if run: steps as fast as samples, or trainers and producers on a clock."""
