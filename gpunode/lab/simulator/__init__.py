"""What makes a lab node look like a GPU server: runs on the node, standard library alone, Python 3.9 and later."""
