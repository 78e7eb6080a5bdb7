"""A run in → an order of passes that has no name, made for it. An annex: `search.find_order`."""
