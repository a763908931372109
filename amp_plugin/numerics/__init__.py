"""Where a number stops being one, and how much each op rounds: diagnose, the shadow run, runs compared."""
