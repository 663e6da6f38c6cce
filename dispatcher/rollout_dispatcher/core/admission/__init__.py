"""Admission of pushes: checks, caps, the queue of blocked pushes, and the producers' state."""
