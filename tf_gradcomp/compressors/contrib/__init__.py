"""Methods whose results are promised less: tried in simulation, kept by the same tests."""
