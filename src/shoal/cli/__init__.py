"""The `shoal` command: one thin file per subcommand."""
