"""Benchmarks that run amp_plugin, torch and a hardware limit alternately in one process."""
