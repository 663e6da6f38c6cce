"""Payloads in a TransferQueue: the store, and which of the processes behind it have ended."""
