"""Stands in for the SGLang package: `python -m sglang.launch_server` behaves as its source says."""
