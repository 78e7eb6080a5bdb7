"""A run, or many over time → what stands on the core.

Each could be deleted with its folder, its verb and its page.
"""
