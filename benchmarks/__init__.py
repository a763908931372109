"""Side-by-side benchmarks: ours, torch's and the machine's limit, in turns, in one process."""
