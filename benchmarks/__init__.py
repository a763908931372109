"""Benchmarks that compare amp_plugin with torch and with hardware limits, in alternating runs."""
