"""Measurements; each checks its subject before it prints a number."""
