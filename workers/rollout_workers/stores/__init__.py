"""Payload stores: engines that keep payloads outside of the dispatcher, which has references."""
