"""What is kept along with the state, so that no event has to look at all of it."""
