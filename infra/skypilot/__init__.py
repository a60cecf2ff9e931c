"""Sprawl on SkyPilot: what runs on its machines (`trainer`, `island`), and the fleet that launches them (`fleet`)."""
