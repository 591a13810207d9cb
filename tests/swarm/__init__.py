"""Swarms of simulations: each seed draws its own mix of work and faults; see :mod:`swarm.command`."""
