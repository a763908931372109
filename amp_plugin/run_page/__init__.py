"""The page of a run: one HTML file that shows what mixed precision did to it."""
