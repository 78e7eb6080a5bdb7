"""Messages of a trace, logs or a live test in → what each hop should do, and what it does."""

from debubble import let_be_called

let_be_called(__name__)
