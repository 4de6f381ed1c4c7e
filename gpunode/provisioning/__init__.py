"""What each role changes on a node: typed state in, typed manifest out. Roles and ``gpunode plan`` share it."""
