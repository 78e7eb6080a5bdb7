"""Captures over time in → metrics, alerts, pages: a loop over the other rooms."""
