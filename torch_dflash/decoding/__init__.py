"""Decoding: the loop, acceptance, stops and statistics."""
