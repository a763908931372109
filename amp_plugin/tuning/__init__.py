"""Find op rules by measurement, so that a program saves memory or casts, or avoids an overflow."""
