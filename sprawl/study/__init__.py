"""Studies: matched arms of one run, trained as real runs and laid beside each other.

`config` reads a study file, `plan` turns it into cells (an arm with a seed: one run), `board` says what is there of each
cell already, `process` and `runner` train the missing ones; `measures`, `table`, `staleness` and `figures` read the
ledgers of the finished ones.
"""
