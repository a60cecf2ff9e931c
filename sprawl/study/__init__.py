"""Studies: matched arms of one run, trained as real runs and laid beside each other.

`config` reads a study file, `plan` turns it into cells (an arm with a seed: one run), `board` says what there is of
each cell already, `process` and `runner` train the missing ones. `measures` and `staleness` compute numbers from
ledgers, `table` and `figures` show them, `results` puts them together.
"""
