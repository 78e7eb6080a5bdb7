"""Logs of nccl-tests, nvbandwidth and nvidia-smi in → the figures they print."""
