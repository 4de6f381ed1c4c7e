"""The workload: the payload that runs inside a container on a node, and the launcher that starts it there.

``launch`` gets a transport to a node and runs the payload over it; docs/workload.md lists what it may and may not do.
"""
