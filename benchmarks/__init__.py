"""Measurements, each `python -m benchmarks.NAME`; `benchmarks.report` turns their committed JSON into README's tables."""
