"""Search op rules by measurement: fewer bytes, or a cure for a run that overflows."""
