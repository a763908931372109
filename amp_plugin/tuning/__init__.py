"""Finds op rules by measurement: rules that need fewer bytes, or that cure a run that overflows."""
