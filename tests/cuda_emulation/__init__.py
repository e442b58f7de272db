"""Runs the CUDA kernels on the CPU, for tests."""
