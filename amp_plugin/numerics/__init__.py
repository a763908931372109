"""Find the op that makes a nan or inf, and how much each op rounds: diagnose, shadow_run, compare_runs."""
