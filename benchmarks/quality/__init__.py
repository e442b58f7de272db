"""What compression does to a model: ``python -m benchmarks.quality``. See docs/quality.md."""
