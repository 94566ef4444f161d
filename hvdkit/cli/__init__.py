"""The `hvdkit` command: one file per subcommand."""
