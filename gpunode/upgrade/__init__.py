"""The driver of a fleet through a change: looks at nodes, the plan of a run, and the run on real nodes.

``change`` has the states, the journal and the schedulers, and knows of nodes by an interface; what implements it is
here.
"""
