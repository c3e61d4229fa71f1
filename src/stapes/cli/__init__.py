"""The `stapes` command: one file a command."""
