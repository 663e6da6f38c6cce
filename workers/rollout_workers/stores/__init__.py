"""Payload stores: engines that keep payloads outside of the dispatcher, by reference."""
