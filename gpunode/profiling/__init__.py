"""Profiles of a command: how it is run under a profiler, what the profile holds, and what it means."""
