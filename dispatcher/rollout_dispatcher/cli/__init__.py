"""The `dispatcher` command: one module a subcommand, named in `main.COMMANDS`."""
