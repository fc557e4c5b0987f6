"""The `atom` command, one file per subcommand."""
