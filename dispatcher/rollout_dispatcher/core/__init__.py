"""The pure core: events in, effects and facts out, time as an argument."""
