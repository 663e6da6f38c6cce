"""Decides: events in, effects and facts out; time is an argument, and nothing is performed here."""
