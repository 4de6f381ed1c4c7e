"""Tests over several nodes: what must be true before ranks meet, how ranks start, and the verdict on the fabric."""
