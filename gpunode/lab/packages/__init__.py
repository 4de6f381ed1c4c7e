"""Declarations of the lab's simulated packages: names, dependencies, versions, content. Pure; nothing is built here."""
