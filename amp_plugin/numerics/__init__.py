"""Which op makes a nan or an infinity, and how much each op rounds: diagnose, shadow_run, compare_runs."""
