"""Nothing in → a real gloo pipeline and its profiler traces out."""

from debubble.annexes.demo.workload import Workload, run_workload

__all__ = ["Workload", "run_workload"]
