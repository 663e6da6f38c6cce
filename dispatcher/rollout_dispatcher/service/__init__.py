"""The asyncio shell: passes messages of peers to the core, and performs its effects."""
