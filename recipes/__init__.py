"""Runnable training programs, one idea each."""
