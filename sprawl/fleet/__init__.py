"""How many islands a run should have, and bringing it about: measuring (`balance`), deciding (`policy`, pure), keeping
what was decided on the board (`log`), and acting through the fleet port (`controller`)."""
