"""Answers in → one HTML file out: no library, no request, a script and a style of our own."""
