"""Facts of an `Analysis` in → each verb's answer, one typed struct: JSON, text and HTML show it."""
