"""Pure values: ladder, address, topology, delay, envelope, foreign ladders, simulation."""
