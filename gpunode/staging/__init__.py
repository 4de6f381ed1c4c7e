"""Copies of data sets on a local disk: copied in pieces, verified, resumed, and the least recently used one evicted."""
