"""Find op rules by measurement. Such rules save memory or casts, or avoid an overflow."""
