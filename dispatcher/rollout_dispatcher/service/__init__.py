"""The asyncio shell: carries what peers say to the core, and performs what it decides."""
