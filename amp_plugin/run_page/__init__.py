"""Write the run report, a single HTML file that shows how mixed precision behaves in a run."""
