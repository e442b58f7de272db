"""Benchmarks: ``python -m benchmarks.lookup``, ``python -m benchmarks.training``, ``python -m benchmarks.plot``."""
