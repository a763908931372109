"""One module per training framework; no numerics here."""
