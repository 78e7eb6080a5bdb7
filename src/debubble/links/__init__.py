"""Messages of a trace, logs or a live test in → what each hop should do, and what it does."""
