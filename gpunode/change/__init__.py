"""A fleet through a change: the states of a node, who hands out work, the journal, the lease, and the run."""
