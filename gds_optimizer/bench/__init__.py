"""How long a step takes on this machine's drives, and what the drives would allow at best."""
