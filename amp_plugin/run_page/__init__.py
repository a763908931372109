"""The page of a run: what precision did to it, drawn, in one HTML file."""
