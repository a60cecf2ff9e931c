"""The drift controller: reads what the ledger says about the steps so far and decides what the next one does.

`observation`, `trend`, `symptoms`, `levels` and `verdict` are pure; `sprawl.run.controller` is their place in a run.
"""
