"""A model in → what its layers take on one device, and what pipelines of it would."""
