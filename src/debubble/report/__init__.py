"""Results in → text and JSON out. Only this room draws."""
