"""What a hop should do, and what it does."""
