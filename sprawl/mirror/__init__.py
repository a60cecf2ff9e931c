"""Regional read-through relays of a board, and the store that reads through them without having to trust them."""
