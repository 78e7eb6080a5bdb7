"""`Schedule` and `Costs` in → `Timeline` out. Today: the closed forms of theory."""
