"""Programs that make a lab node look like a GPU server: run on the node, standard library, Python 3.9 and later."""
