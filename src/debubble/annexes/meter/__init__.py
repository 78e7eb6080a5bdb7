"""A running job in → its bubble, all the time, without the profiler.

It needs torch and the standard library alone.
"""
