"""Measure a program to find op rules that need less memory or fewer casts, or that avoid an overflow."""
