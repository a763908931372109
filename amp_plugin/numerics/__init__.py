"""Find the op that produces a nan or inf, and measure the rounding of each op.

The public functions are diagnose, shadow_run, log_formats, record_run and compare_runs.
"""
