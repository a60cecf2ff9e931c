"""What a run on a cluster needs to know about its machines: the fabric between the trainer's nodes, and what a run will
cost in bytes, seconds, memory and dollars."""
