"""Nothing in → a real gloo pipeline of timed layers, as a job that knows of no profiler."""
