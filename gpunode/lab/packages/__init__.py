"""The lab's simulated packages, declared: names, dependencies, versions, content. Pure; nothing is built here."""
