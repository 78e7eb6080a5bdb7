"""What to change, and what each change would buy before anyone tries it."""
