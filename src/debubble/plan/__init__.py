"""What a run cost in → what to change, ranked, and how to write the change down."""
