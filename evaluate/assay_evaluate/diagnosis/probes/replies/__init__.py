"""Probes that look at what replies say: signs of garbled text, numbers that are none, replies to another request."""
