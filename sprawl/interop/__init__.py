"""Other projects' ways of moving weights, so that their trainers can feed our islands and ours theirs."""
