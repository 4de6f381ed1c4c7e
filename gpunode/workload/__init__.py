"""What runs inside a container on a node, and what starts it there."""
