"""`RankTrace`s in → `Timeline` out: one clock, who holds which stage, which span is which pass."""
