"""Memory that processes of one host share: sealed segments, and descriptors that arrive."""
