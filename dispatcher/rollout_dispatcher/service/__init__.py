"""The asyncio shell: passes messages to the core, and performs its decisions."""
