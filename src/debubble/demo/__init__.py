"""Nothing in → a real gloo pipeline and its profiler traces out."""

from debubble.demo.launch import run_workload
from debubble.demo.workload import Workload

__all__ = ["Workload", "run_workload"]
