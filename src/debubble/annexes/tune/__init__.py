"""A command that can be told its setting in → the setting that runs best out, by running it."""
