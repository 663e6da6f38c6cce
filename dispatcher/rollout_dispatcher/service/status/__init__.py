"""How the service is, in words: whether it is ready, what it waits for, and how it gets on."""
