"""Runs that are kept, and what they show: changes, outliers of a fleet, trends."""
