"""Changes of each role on a node: typed state in, typed manifest out. Shared by the roles and ``gpunode plan``."""
