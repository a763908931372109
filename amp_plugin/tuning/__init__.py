"""Find op rules by measurement. The rules that are found save memory or casts, or avoid an overflow."""
