"""The ranks of a job in → what each hop between them takes, measured by sending."""
