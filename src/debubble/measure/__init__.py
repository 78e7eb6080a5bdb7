"""Runs in → their numbers as samples, the verdict on a change, the record of all of them."""
