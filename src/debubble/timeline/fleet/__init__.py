"""A run of any size in → every pipeline measured, and the one that matters most held in full."""
