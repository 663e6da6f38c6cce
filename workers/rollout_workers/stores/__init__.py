"""Payload stores: engines that keep payloads outside the dispatcher."""
