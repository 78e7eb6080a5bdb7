"""What to change, and what each change would buy before anyone tries it."""

from debubble import let_be_called

let_be_called(__name__)
