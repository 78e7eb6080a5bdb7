"""debubble finds where a pipeline-parallel PyTorch job waits, and what to do about it."""

__version__ = "0.1.0"
