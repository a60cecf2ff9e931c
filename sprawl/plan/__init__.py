"""What a run will need before it is started: bytes, seconds, memory and dollars of a config."""
