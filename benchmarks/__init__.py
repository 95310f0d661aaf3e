"""Measurements, each `python -m benchmarks.NAME`; `benchmarks.report` puts their JSON
into README as tables.
"""
