"""The simulated world: virtual time, one thread, and a schedule that comes from a tape."""
